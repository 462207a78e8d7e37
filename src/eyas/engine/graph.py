"""Rounds as CUDA graphs: captured once per shape, replayed without host work inside (D6, D8).

A round is two graphs, draft and verify, replayed back to back; a plain round, which drafts nothing,
is one. Their only input is a static tensor of slot numbers; everything else that a round reads and
writes lies in device tensors that never move. Batches are padded with the trash slot to a few
sizes, so that few graphs serve all; they share one memory pool. Where attention reads its lengths
from the device alone one graph serves any length; otherwise lengths are padded to a few bounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from eyas.config import TreeShape
from eyas.kernels import SamplingMode
from eyas.speculative.round import RoundOutput, RoundRunner

logger = logging.getLogger(__name__)

SHORTEST_KV_LEN = 256
_WARM_UPS = 2  # libraries choose algorithms and allocate workspaces in the first calls


@dataclasses.dataclass(frozen=True)
class GraphKey:
    """What is fixed in a captured round."""

    num_requests: int
    max_kv_len: int
    shape: TreeShape
    mode: SamplingMode


class PartTimer:
    """Events before, between and after the parts of a replayed round."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, torch.cuda.Event]] = []

    def mark(self, part: str) -> None:
        """What was launched since the last mark is this part."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append((part, event))

    def seconds(self) -> dict[str, float]:
        """Device time by part, of a round that has ended."""
        pairs = itertools.pairwise(self._marks)
        return {part: before.elapsed_time(after) / 1e3 for (_, before), (part, after) in pairs}


@dataclasses.dataclass
class _Captured:
    """graphs: by part, to replay in order. slots_B: their input."""

    graphs: dict[str, torch.cuda.CUDAGraph]
    slots_B: torch.Tensor
    output: RoundOutput
    slots: tuple[int, ...] = ()  # what slots_B holds


def padded_size(count: int, most: int) -> int:
    """The batch size that is run for `count` requests: a power of two, or the largest batch."""
    return min(1 << (count - 1).bit_length(), most)


def batch_sizes(most: int) -> list[int]:
    """All sizes that padded_size gives, ascending."""
    return sorted({padded_size(count, most) for count in range(1, most + 1)})


def padded_length(max_kv_len: int, most: int) -> int:
    """The bound of lengths that is run: SHORTEST_KV_LEN times a power of two, or the most."""
    length = SHORTEST_KV_LEN
    while length < max_kv_len:
        length *= 2
    return min(length, most)


class RoundGraphs:
    """Captures a round when its key is first seen and replays it afterwards.

    any_length: the backends' plans do not depend on max_kv_len. mixes_noise: sampled and greedy
    requests cost the same in one launch, so that no graph is kept for greedy batches alone.
    """

    def __init__(
        self,
        runner: RoundRunner,
        *,
        num_slots: int,
        max_kv_len: int,
        any_length: bool = False,
        mixes_noise: bool = False,
    ) -> None:
        self._runner, self._num_slots, self._max_kv_len = runner, num_slots, max_kv_len
        self._any_length, self._mixes_noise = any_length, mixes_noise
        self._captured: dict[GraphKey, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._captured)

    def round(
        self, slots: Sequence[int], shape: TreeShape, *, max_kv_len: int, mode: SamplingMode
    ) -> tuple[RoundOutput, PartTimer]:
        """As RoundRunner.round, and how long its parts take: "draft", and "verify" with all that
        follows. The output is overwritten by the next replay of the same key."""
        captured = self._get(self.key(len(slots), shape, max_kv_len=max_kv_len, mode=mode))
        trash = self._runner.state.trash_slot
        padded = (*slots, *[trash] * (len(captured.slots_B) - len(slots)))
        if padded != captured.slots:  # the same requests run many rounds: nothing to copy
            captured.slots_B.copy_(torch.tensor(padded), non_blocking=True)
            captured.slots = padded
        timer = PartTimer()
        timer.mark("start")
        for part, graph in captured.graphs.items():
            graph.replay()
            timer.mark(part)
        return _first(captured.output, len(slots)), timer

    def key(
        self, num_requests: int, shape: TreeShape, *, max_kv_len: int, mode: SamplingMode
    ) -> GraphKey:
        """The graph that serves such a round."""
        length = self._max_kv_len
        if not self._any_length:
            length = padded_length(max_kv_len, length)
        if self._mixes_noise:
            mode = dataclasses.replace(mode, noise=True)
        return GraphKey(padded_size(num_requests, self._num_slots), length, shape, mode)

    def capture(
        self, shapes: Iterable[TreeShape], *, progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Capture the usual rounds of these shapes for all batch sizes; how many graphs there are.

        Rounds with penalties, truncation, biases or log-probabilities are captured when they are
        first run; so are sampled ones where noise has graphs of its own, and all but the shortest
        where attention depends on lengths.
        """
        keys = [
            self.key(size, shape, max_kv_len=1, mode=SamplingMode())
            for shape in shapes
            for size in reversed(batch_sizes(self._num_slots))  # the pool fits the largest first
        ]
        for number, key in enumerate(keys):
            self._get(key)
            if progress is not None:
                progress(number + 1, len(keys))
        return len(self)

    def _get(self, key: GraphKey) -> _Captured:
        if key not in self._captured:
            self._captured[key] = self._capture(key)
        return self._captured[key]

    def _capture(self, key: GraphKey) -> _Captured:
        start = time.perf_counter()
        state = self._runner.state
        # Warm-up rounds run on the trash slot alone: nothing that anybody reads changes.
        slots_B = torch.full((key.num_requests,), state.trash_slot, device=state.device)

        def run(part: Callable[[str], contextlib.AbstractContextManager[None]]) -> RoundOutput:
            fixed: dict[str, Any] = {"max_kv_len": key.max_kv_len, "mode": key.mode}
            if not key.shape.depth:
                with part("verify"):
                    return self._runner.round(slots_B, key.shape, **fixed)
            with part("draft"):
                drafted = self._runner.draft(slots_B, key.shape, **fixed)
            with part("verify"):
                return self._runner.verify(drafted, key.shape, **fixed)

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run(lambda _: contextlib.nullcontext())
        torch.cuda.current_stream().wait_stream(stream)
        graphs: dict[str, torch.cuda.CUDAGraph] = {}

        @contextlib.contextmanager
        def capture(part: str) -> Iterator[None]:
            graphs[part] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[part], pool=self._pool):
                yield

        output = run(capture)
        logger.debug("captured %s in %.2f s", key, time.perf_counter() - start)
        return _Captured(graphs, slots_B, output)


def _first(output: RoundOutput, count: int) -> RoundOutput:
    """Without the padding rows."""
    parts = (output.packed, output.logprob_id, output.logprob)
    packed, ids, values = (None if part is None else part[:count] for part in parts)
    assert packed is not None
    return RoundOutput(packed, ids, values)
