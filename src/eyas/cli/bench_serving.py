"""`eyas bench serving`: a server's speed over HTTP."""

from __future__ import annotations

import contextlib
import shlex
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from eyas.cli.bench import JsonFile, Plot, Prompts, bench_app, write_json
from eyas.cli.errors import EXIT_FINDINGS
from eyas.cli.flags import number_list
from eyas.cli.progress import ProgressBars
from eyas.config import ConfigError

Target = Annotated[
    str,
    typer.Argument(
        metavar="URL|MODEL",
        help="A running server (http://...), or a model to serve for the benchmark.",
    ),
]
ServeFlags = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- FLAGS]", help="With MODEL: flags of `eyas serve`.", hidden=False),
]
Rate = Annotated[
    Any,
    typer.Option(help="Requests a second, a run each.", **number_list("--rate", float)),
]
FirstTokenGoal = Annotated[float, typer.Option(help="Seconds, for goodput.")]
InterTokenGoal = Annotated[float, typer.Option(help="Seconds a token on average, for goodput.")]
ApiKey = Annotated[
    str | None,
    typer.Option(help="That the server wants.", envvar="EYAS_API_KEY", show_envvar=True),
]


@bench_app.command()
def serving(
    target: Target,
    serve_flags: ServeFlags = None,
    *,
    rate: Rate = (1.0,),
    num_requests: Annotated[int, typer.Option(help="Requests of each run.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="New tokens of an answer at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate --max-tokens tokens, always.")
    ] = False,
    prompts: Prompts = None,
    seed: Annotated[int, typer.Option(help="Of the arrivals and of sampling.")] = 0,
    first_token_goal: FirstTokenGoal = 1.0,
    inter_token_goal: InterTokenGoal = 0.1,
    served_model_name: Annotated[
        str | None, typer.Option(help="As the server calls the model (default: it is asked).")
    ] = None,
    api_key: ApiKey = None,
    plot: Plot = None,
    json_file: JsonFile = None,
) -> int:
    """Time a server under requests that arrive at given rates, however far behind it is.

    Exits with 2 when a request failed.
    """
    is_url = target.startswith(("http://", "https://"))
    if is_url and serve_flags:
        raise ConfigError("flags after -- are for a server that is started: give a MODEL")
    with ProgressBars() as bars, contextlib.ExitStack() as stack:
        from eyas.bench import serving_report
        from eyas.bench.server_process import running_server
        from eyas.bench.serving import ServingSettings, run_serving
        from eyas.bench.serving_results import Goals

        settings = ServingSettings(
            rates=rate,
            num_requests=num_requests,
            max_tokens=max_tokens,
            temperature=temperature,
            ignore_eos=ignore_eos,
            prompts_file=prompts,
            seed=seed,
            goals=Goals(first_token_goal, inter_token_goal),
            model=served_model_name,
            api_key=api_key.split()[0] if api_key else None,  # `serve` takes several
        )
        url = target
        if not is_url:
            url = stack.enter_context(running_server(target, serve_flags or [], progress=bars))
        result = run_serving(url, settings, on_request=bars.counter("requests"))
    serving_report.render(result, Console(highlight=False))
    write_json(json_file, lambda: serving_report.to_json(result, command=shlex.join(sys.argv)))
    if plot is not None:
        from eyas.bench.plot import plot_serving

        plot_serving(result, plot)
    return 0 if result.ok else EXIT_FINDINGS
