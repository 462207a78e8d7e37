"""Stage 4: how many tokens a round a draft brings, in the engine that serves it.

Accuracies from training are teacher-forced; what counts is the acceptance length in the engine, on
prompts that were held out. Rounds are summed, so that a long answer weighs as much as it takes
time. Answers that repeat themselves are easy to foretell and reported apart.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from eyas.engine.engine import Engine
from eyas.train.batching import Answer, Job, is_looping, run_jobs
from eyas.train.engines import BatchEngine, open_engine, target_folder
from eyas.train.masks import ChatTemplate
from eyas.train.prompts import Prompt
from eyas.train.stage_settings import EvaluateSettings, Mode, Placement
from eyas.types import EyasError, SamplingParams

ALL = "all"


@dataclasses.dataclass
class Acceptance:
    """Sums over answers. counts: rounds by the number of drafted tokens that they emitted."""

    num_answers: int = 0
    num_rounds: int = 0
    num_tokens: int = 0
    counts: list[int] = dataclasses.field(default_factory=list)

    def add(self, answer: Answer) -> None:
        """Count one answer's rounds."""
        self.num_answers += 1
        self.num_rounds += answer.last.num_rounds
        self.num_tokens += answer.last.num_round_tokens
        pairs = itertools.zip_longest(self.counts, answer.last.accepted_counts, fillvalue=0)
        self.counts = [mine + more for mine, more in pairs]

    @property
    def length(self) -> float:
        """Tokens emitted per target forward, the bonus token included; NaN before any round."""
        return self.num_tokens / self.num_rounds if self.num_rounds else float("nan")

    def rates(self) -> list[float]:
        """Entry k: share of rounds that emitted more than k drafted tokens (position k + 1)."""
        at_least = itertools.accumulate(reversed(self.counts))
        return [count / self.num_rounds for count in reversed(list(at_least)[:-1])]


@dataclasses.dataclass
class ModeResult:
    """One mode by source, ALL among them. looping: the answers left out of it, by source too."""

    mode: Mode
    by_source: dict[str, Acceptance]
    looping: dict[str, Acceptance]


@dataclasses.dataclass
class Evaluation:
    """What was measured. num_skipped: prompts too long for the target."""

    settings: EvaluateSettings
    num_prompts: int
    num_skipped: int
    modes: list[ModeResult]

    def length(self, mode: int = 0) -> float:
        """Acceptance length of a mode over all prompts, looping answers left out (unless every
        answer is one)."""
        result = self.modes[mode]
        counted = result.by_source[ALL] if result.by_source[ALL].num_rounds else result.looping[ALL]
        return counted.length


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Prompts as tokens with their sources, and how many were too long."""

    prompts: list[tuple[list[int], str]]
    num_skipped: int

    @classmethod
    def render(
        cls, template: ChatTemplate, prompts: Sequence[Prompt], *, max_prompt_tokens: int
    ) -> HeldOut:
        """First turns under the template. Raises EyasError when none is short enough."""
        rendered = [
            (template.encode(template.text(p.messages(), for_answer=True)), p.source)
            for p in prompts
        ]
        kept = [(ids, source) for ids, source in rendered if len(ids) <= max_prompt_tokens]
        if not kept:
            raise EyasError(
                f"no evaluation prompt has at most {max_prompt_tokens} tokens: the target's "
                "length leaves no room for answers; lower --eval-tokens"
            )
        return cls(kept, len(rendered) - len(kept))

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        return max(len(ids) for ids, _ in self.prompts)


def evaluate(
    target: str,
    draft: str,
    prompts: Sequence[Prompt],
    settings: EvaluateSettings,
    *,
    placement: Placement,
    max_model_len: int,
    modes: Sequence[Mode] | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Measure a draft (a folder) on held-out prompts. max_model_len: the target's own.

    modes: those to measure, by default all of the settings. on_done: called with (answers done,
    answers in all).
    """
    template = ChatTemplate.open(target_folder(target), placement.template_settings)
    room = max_model_len - settings.max_new_tokens
    held_out = HeldOut.render(template, prompts, max_prompt_tokens=room)
    depth, topk, nodes = settings.tree
    opened = open_engine(
        target,
        placement=placement,
        max_model_len=held_out.longest + settings.max_new_tokens,
        num_requests=len(held_out.prompts),
        draft=draft,
        num_speculative_tokens=depth,
        topk=topk,
        num_tree_nodes=nodes,
    )
    modes = settings.modes() if modes is None else modes
    total, num_done = len(modes) * len(held_out.prompts), itertools.count(1)

    def one_done() -> None:
        if on_done is not None:
            on_done(next(num_done), total)

    results = [run_mode(opened, held_out, mode, settings, one_done) for mode in modes]
    return Evaluation(settings, len(prompts), held_out.num_skipped, results)


def run_mode(
    opened: BatchEngine,
    held_out: HeldOut,
    mode: Mode,
    settings: EvaluateSettings,
    one_done: Callable[[], None],
) -> ModeResult:
    """Answer all prompts in one mode."""
    result = ModeResult(mode, {ALL: Acceptance()}, {ALL: Acceptance()})
    engine: Engine = opened.engine
    assert mode.shape.num_nodes <= engine.worker.shape.tree.num_nodes
    engine.tree = mode.shape

    def done(source: str, answer: Answer) -> Iterable[Job]:
        group = result.looping if is_looping(answer.token_ids) else result.by_source
        for name in (source, ALL):
            group.setdefault(name, Acceptance()).add(answer)
        one_done()
        return ()

    def jobs() -> Iterator[Job]:
        for index, (prompt_ids, source) in enumerate(held_out.prompts):
            params = SamplingParams(
                max_tokens=settings.max_new_tokens,
                temperature=mode.temperature,
                seed=settings.seed + index,
            )
            yield Job(prompt_ids, params, functools.partial(done, source))

    run_jobs(engine, jobs(), window=opened.window)
    return result


def to_dict(evaluation: Evaluation) -> dict[str, Any]:
    """Plain data, for JSON."""
    return {
        "settings": dataclasses.asdict(evaluation.settings),
        "num_prompts": evaluation.num_prompts,
        "num_skipped": evaluation.num_skipped,
        "modes": [
            {
                "mode": result.mode.name,
                "temperature": result.mode.temperature,
                "shape": dataclasses.asdict(result.mode.shape),
                "by_source": {n: _acceptance_dict(a) for n, a in result.by_source.items()},
                "looping": {n: _acceptance_dict(a) for n, a in result.looping.items()},
            }
            for result in evaluation.modes
        ],
    }


def _acceptance_dict(acceptance: Acceptance) -> dict[str, Any]:
    length = acceptance.length if acceptance.num_rounds else None
    rates = acceptance.rates() if acceptance.num_rounds else []
    return {**dataclasses.asdict(acceptance), "acceptance_length": length, "rates": rates}


def to_markdown(evaluation: Evaluation) -> str:
    """Two tables for a card: tokens a round by prompt set, and acceptance by position."""
    modes = evaluation.modes
    sources = sorted({s for r in modes for s in (*r.by_source, *r.looping)} - {ALL})
    lines = [
        "Tokens per target forward, the bonus token included (answers in brackets):",
        "",
        "| prompts | " + " | ".join(r.mode.name for r in modes) + " |",
        "|---|" + "---|" * len(modes),
    ]
    for title, source in [*((s, s) for s in sources), ("**all**", ALL)]:
        lines.append(_row(title, [r.by_source.get(source) for r in modes]))
    lines.append(_row("looping answers, not counted above", [r.looping[ALL] for r in modes]))
    longest = max(r.mode.shape.depth for r in modes)
    lines += [
        "",
        "Share of rounds in which the drafted token at a position was emitted:",
        "",
        "| mode | " + " | ".join(str(k + 1) for k in range(longest)) + " |",
        "|---|" + "---|" * longest,
    ]
    for result in modes:
        acceptance = result.by_source[ALL]
        rates = acceptance.rates() if acceptance.num_rounds else []
        # The counts end with the last position that any round accepted.
        rates += [0.0] * (result.mode.shape.depth - len(rates))
        cells = [f"{rate:.3f}" if acceptance.num_rounds else "–" for rate in rates]
        cells += [""] * (longest - len(cells))
        lines.append(f"| {result.mode.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _row(title: str, cells: Sequence[Acceptance | None]) -> str:
    texts = [f"{a.length:.2f} ({a.num_answers})" if a and a.num_rounds else "–" for a in cells]
    return f"| {title} | " + " | ".join(texts) + " |"
