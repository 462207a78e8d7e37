"""`eyas demo` and `eyas generate`: text in, text out, in this process."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from eyas.bench.timing import Rates, TokenClock
from eyas.cli.flags import engine_flags, sampling_flags
from eyas.cli.progress import ProgressBars
from eyas.config import EngineConfig
from eyas.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from eyas.engine.llm import LLM

DEMO_MODEL = "smollm2-135m"
DEMO_PROMPT = "What are the benefits of reading books?"


def demo(
    *,
    prompt: Annotated[str, typer.Option("--prompt", help="What to ask.")] = DEMO_PROMPT,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 200,
    draft: Annotated[
        str | None,
        typer.Option(help="EAGLE-3 draft: a local folder, a hub id, or none (default: its own)."),
    ] = None,
) -> None:
    """Let the embedded model, smollm2-135m, answer a prompt, with its draft and without."""
    config = EngineConfig(model=DEMO_MODEL, draft=draft, max_batch_size=1, max_model_len=2048)
    llm = load(dataclasses.replace(config, prefix_caching=False))
    console = Console(stderr=True, highlight=False)
    console.print(Text(f"> {prompt}", "bold"), soft_wrap=True)
    token_ids = llm.tokenizer.render_chat([{"role": "user", "content": prompt}])
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    if config.draft_name is None:
        stream(llm, token_ids, params)
    else:
        _compare(llm, token_ids, params)
    command = f"eyas serve {DEMO_MODEL}" + (f" --draft {draft}" if draft else "")
    console.print(Text(f"Next: `{command}` serves it over an OpenAI-compatible API."))


def _compare(llm: LLM, prompt_token_ids: list[int], params: SamplingParams) -> None:
    """The answer with drafted tokens marked as they are accepted; then both speeds."""
    from eyas.config import PLAIN  # the round that drafts nothing
    from eyas.engine.tokenizer import Detokenizer

    llm.generate([prompt_token_ids], dataclasses.replace(params, max_tokens=2))  # warm up
    console = Console(highlight=False, soft_wrap=True)
    detokenizer, lines = Detokenizer(llm.tokenizer, after=prompt_token_ids), list[str]()
    answers: list[list[int]] = []
    for name, tree in (("with the draft", llm.engine.tree), ("without", PLAIN)):
        llm.engine.tree, clock, answer = tree, TokenClock(), list[int]()
        last: Any = None
        for _, last in llm.stream(prompt_token_ids, params):
            clock.add_step(last)
            answer += last.new_token_ids
            if not answers:  # a round's last token is the target's own choice
                console.print(Text(detokenizer.add(last.new_token_ids[:-1]), "green"), end="")
                console.print(Text(detokenizer.add(last.new_token_ids[-1:])), end="")
        if not answers:
            console.print()
            _print_stats("Green: drafted, and accepted by the target. Now without the draft ...")
        answers.append(answer)
        rounds = (last.num_rounds, last.num_round_tokens)
        lines.append(f"{name + ':':16}{describe_speed(clock.rates(), rounds, drafts=True)}")
    for line in lines:
        _print_stats(line)
    _print_stats(_describe_same(*answers))


def _describe_same(drafted: list[int], plain: list[int]) -> str:
    if drafted == plain:
        return "Both gave the same text."
    same = next(i for i, (a, b) in enumerate(zip(drafted, plain, strict=False)) if a != b)
    return (
        f"The texts part at token {same}: in bfloat16 rounding depends on how many rows run at "
        "once, and may decide between two tokens of nearly the same logit."
    )


@engine_flags()
@sampling_flags(max_tokens=256, temperature=0.0)
def generate(
    *,
    config: EngineConfig,
    prompt: Annotated[
        list[str], typer.Option("--prompt", help="Repeat it for a batch of several.")
    ],
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Whether the prompt is a user's message under the chat template, or text to "
            "continue; default: a message where the model has a template.",
        ),
    ] = None,
    params: SamplingParams,
) -> None:
    """Generate text from one or several prompts."""
    llm = load(config)
    use_chat = llm.tokenizer.has_chat_template if chat is None else chat
    token_ids = [
        llm.tokenizer.render_chat([{"role": "user", "content": text}])
        if use_chat
        else llm.tokenizer.encode(text)
        for text in prompt
    ]
    if len(prompt) == 1:
        stream(llm, token_ids[0], params)
        return
    for text, output in zip(prompt, llm.generate(token_ids, params), strict=True):
        print(f"> {text}\n{output.text}\n", flush=True)
        _print_stats(describe_output(output))


def load(config: EngineConfig) -> LLM:
    """The model, with progress bars; raises what eyas.LLM raises."""
    with ProgressBars() as bars:
        # Heavy: torch. Under the bars, so that something is on the screen meanwhile.
        from eyas.engine.llm import LLM

        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        return LLM(**values, progress=bars)


def stream(llm: LLM, prompt_token_ids: list[int], params: SamplingParams) -> None:
    """Print an answer as it comes, then how fast it came (on stderr)."""
    clock = TokenClock()
    last: Any = None
    for text, last in llm.stream(prompt_token_ids, params):
        clock.add_step(last)
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    drafts = llm.report.draft is not None
    _print_stats(describe_speed(clock.rates(), (last.num_rounds, last.num_round_tokens), drafts))


def describe_speed(rates: Rates, rounds: tuple[int, int], drafts: bool) -> str:
    """One line. rounds: target forwards after the prompt, and tokens that they emitted."""
    speed = rates.decode_tokens_per_second
    parts = [f"{rates.num_tokens} tokens"]
    if speed is not None:
        parts.append(f"{speed:.1f} tok/s")
    parts.append(f"first token after {rates.first_token_seconds:.2f} s")
    if drafts and rounds[0]:
        parts.append(f"{rounds[1] / rounds[0]:.2f} tokens per target forward")
    return ", ".join(parts)


def describe_output(output: RequestOutput) -> str:
    """One line on an answer of a batch."""
    text = f"{len(output.token_ids)} tokens, finished by {output.finish_reason.value}"
    if output.num_rounds and output.num_round_tokens > output.num_rounds:
        text += f", {output.acceptance_length:.2f} tokens per target forward"
    return text


def _print_stats(text: str) -> None:
    Console(stderr=True, highlight=False).print(Text(text, "dim"), soft_wrap=True)
