"""The commands, put together."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from eyas.cli import bench_serving  # noqa: F401  (adds its command to bench_app)
from eyas.cli.bench import bench_app
from eyas.cli.check import audit, check
from eyas.cli.errors import EyasGroup
from eyas.cli.generate import demo, generate
from eyas.cli.serve import serve
from eyas.cli.train import train
from eyas.cli.wait import wait

app = typer.Typer(
    cls=EyasGroup,
    help="Serve large language models with EAGLE-3 speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    # Plain help: boxes cut the longer flags short on a narrow terminal.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"eyas {importlib.metadata.version('eyas')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print it and exit."
        ),
    ] = False,
) -> None:
    """Serve large language models with EAGLE-3 speculative decoding."""


for _command in (demo, generate, serve, wait, train, check, audit):
    app.command()(_command)
app.add_typer(bench_app, name="bench")
