"""Keeps an engine's batch full with jobs whose answers may lead to further jobs."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from eyas.types import FinishReason, SamplingParams, StepOutput

LOOP_NGRAM, LOOP_TIMES = 8, 3


class JobEngine(Protocol):
    """What is needed of engine.engine.Engine."""

    def add(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a request."""

    def step(self) -> list[StepOutput]:
        """One turn of the loop."""

    def abort(self, request_id: str) -> None:
        """End a request now."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a job came to. token_ids: all generated, a final stop token included. last: the last
    output, with the counts of rounds."""

    token_ids: list[int]
    last: StepOutput

    @property
    def was_cut(self) -> bool:
        """Whether it ran into its limit and so has no end."""
        return self.last.finish_reason is FinishReason.LENGTH


@dataclasses.dataclass(frozen=True)
class Job:
    """One request. done: told the answer; returns the jobs that follow from it."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    done: Callable[[Answer], Iterable[Job]]


def run_jobs(
    engine: JobEngine,
    jobs: Iterable[Job],
    *,
    window: int,
    stop_at: float | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> bool:
    """Run all jobs and what follows from them; False when time ran out first.

    window: requests in the engine at once, somewhat above its batch size, so that a free slot
    always finds one waiting. stop_at: on the clock of time.monotonic; what has not ended by then is
    aborted. on_tokens: told how many tokens each step brought.
    """
    source, ids = iter(jobs), itertools.count()
    live: dict[str, tuple[Job, list[int]]] = {}

    def start(job: Job) -> None:
        request_id = f"job-{next(ids)}"
        engine.add(request_id, job.prompt_ids, job.params)
        live[request_id] = job, []

    def fill(following: Iterable[Job] = ()) -> None:
        for job in following:
            start(job)
        while len(live) < window and (more := next(source, None)) is not None:
            start(more)

    try:
        fill()
        while live:
            if stop_at is not None and time.monotonic() >= stop_at:
                return False
            outputs = engine.step()
            if on_tokens is not None:
                on_tokens(sum(len(output.new_token_ids) for output in outputs))
            for job, answer in _ended(outputs, live):
                fill(job.done(answer))
    finally:
        for request_id in live:
            engine.abort(request_id)
    return True


def _ended(
    outputs: Sequence[StepOutput], live: dict[str, tuple[Job, list[int]]]
) -> Iterator[tuple[Job, Answer]]:
    """Add new tokens to the live jobs, and take those out that have ended."""
    for output in outputs:
        if output.request_id not in live:
            continue
        job, token_ids = live[output.request_id]
        token_ids += output.new_token_ids
        if output.finish_reason is not None:
            del live[output.request_id]
            yield job, Answer(token_ids, output)


def is_looping(
    token_ids: Sequence[int], *, ngram: int = LOOP_NGRAM, times: int = LOOP_TIMES
) -> bool:
    """Whether some run of `ngram` tokens occurs `times` times or more.

    Small models, most of all when greedy, fall into repeating themselves, which any draft learns at
    once: such answers would flatter both training and evaluation.
    """
    counts: dict[tuple[int, ...], int] = {}
    for start in range(len(token_ids) - ngram + 1):
        run = tuple(token_ids[start : start + ngram])
        counts[run] = counts.get(run, 0) + 1
        if counts[run] >= times:
            return True
    return False
