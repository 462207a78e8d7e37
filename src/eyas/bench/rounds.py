"""Runs full batches of an engine and times their rounds, without prefill and without the tail in
which some requests have ended already."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections.abc import Sequence
from types import TracebackType

from eyas.engine.engine import Engine
from eyas.engine.stats import EngineCounters
from eyas.types import EyasError, SamplingParams, StepOutput

_ids = itertools.count()


@dataclasses.dataclass(frozen=True)
class RoundSample:
    """Rounds of a whole batch. num_tokens: of all requests. host_seconds: in which the host did
    anything but wait for the device. part_seconds: "draft", "verify" and "host" where calls
    return when their work is done (a CPU), else empty."""

    batch_size: int
    num_rounds: int
    num_tokens: int
    seconds: float
    host_seconds: float
    part_seconds: dict[str, float]

    @property
    def round_seconds(self) -> float:
        """Mean time of a round."""
        return self.seconds / self.num_rounds

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch."""
        return self.num_tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Tokens a request and round, the bonus token included."""
        return self.num_tokens / (self.num_rounds * self.batch_size)


class Batch:
    """Requests that run side by side: prefilled when entered, gone when left.

    new_tokens: that each generates, greedily and whatever they are.
    """

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        self._engine, self._prompts, self._new_tokens = engine, prompts, new_tokens
        self._ids = [f"batch-{next(_ids)}" for _ in prompts]

    def __enter__(self) -> Batch:
        engine = self._engine
        params = SamplingParams(max_tokens=self._new_tokens, temperature=0.0, ignore_eos=True)
        for seed, (request_id, prompt) in enumerate(zip(self._ids, self._prompts, strict=True)):
            engine.add(request_id, prompt, dataclasses.replace(params, seed=seed))
        waiting = set(self._ids)
        while waiting:
            waiting -= {output.request_id for output in self._step()}
        self._step()  # what is read from now on are rounds of all
        gc.collect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for request_id in self._ids:
            self._engine.abort(request_id)
        while kind is None and self._engine.has_work:
            self._engine.step()

    def run(self, num_rounds: int | None = None) -> RoundSample:
        """Run rounds until the first request ends, or this many. Raises EyasError when one ends
        before the first round."""
        engine, count, num_tokens = self._engine, 0, 0
        before, start = engine.stats.copy(), time.perf_counter()
        ended = len(engine.requests) < len(self._ids)
        while not ended and (num_rounds is None or count < num_rounds):
            outputs = self._step()
            if not outputs:
                continue
            count += 1
            num_tokens += sum(len(output.new_token_ids) for output in outputs)
            ended = any(output.finish_reason is not None for output in outputs)
        seconds = time.perf_counter() - start
        if not count:
            raise EyasError("--new-tokens is too low to time rounds: a request ended before one")
        parts = _part_seconds(before, engine.stats.counters)
        waited = engine.stats.counters.wait_seconds - before.wait_seconds
        host = parts["host"] if "verify" in parts else seconds - waited
        return RoundSample(
            batch_size=len(self._ids),
            num_rounds=count,
            num_tokens=num_tokens,
            seconds=seconds,
            host_seconds=host,
            part_seconds=parts if "verify" in parts else {},
        )

    def _step(self) -> list[StepOutput]:
        outputs = self._engine.step()
        for output in outputs:
            if output.error is not None:
                raise EyasError(f"a request failed in the benchmark: {output.error}")
        return outputs


def _part_seconds(before: EngineCounters, after: EngineCounters) -> dict[str, float]:
    """Seconds by part between two readings, over all groups."""
    seconds: dict[str, float] = {}
    for sign, counters in ((-1, before), (1, after)):
        for times in counters.rounds.values():
            for part, value in times.seconds.items():
                seconds[part] = seconds.get(part, 0.0) + sign * value
    return seconds
