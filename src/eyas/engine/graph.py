"""Rounds as CUDA graphs: captured once per shape, replayed without host work inside (D6, D8).

A graph's only input is a static tensor of slot numbers; everything else that a round reads and
writes lies in device tensors that never move. Batches are padded with the trash slot to a few
sizes and lengths to a few bounds, so that few graphs serve all; they share one memory pool.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch

from eyas.config import TreeShape
from eyas.kernels import SamplingMode
from eyas.speculative.round import RoundOutput, RoundRunner

SHORTEST_KV_LEN = 256
_WARM_UPS = 2  # libraries choose algorithms and allocate workspaces in the first calls


@dataclasses.dataclass(frozen=True)
class GraphKey:
    """What is fixed in a captured round."""

    num_requests: int
    max_kv_len: int
    shape: TreeShape
    mode: SamplingMode


@dataclasses.dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    slots_B: torch.Tensor
    output: RoundOutput


def padded_size(count: int, most: int) -> int:
    """The batch size that is run for `count` requests: a power of two, or the largest batch."""
    return min(1 << (count - 1).bit_length(), most)


def padded_length(max_kv_len: int, most: int) -> int:
    """The bound of lengths that is run: SHORTEST_KV_LEN times a power of two, or the most."""
    length = SHORTEST_KV_LEN
    while length < max_kv_len:
        length *= 2
    return min(length, most)


class RoundGraphs:
    """Captures a round when its key is first seen and replays it afterwards.

    capture_seconds: what all captures have cost so far.
    """

    def __init__(self, runner: RoundRunner, *, num_slots: int, max_kv_len: int) -> None:
        self._runner, self._num_slots, self._max_kv_len = runner, num_slots, max_kv_len
        self._captured: dict[GraphKey, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.capture_seconds = 0.0

    def __len__(self) -> int:
        return len(self._captured)

    def round(
        self, slots: Sequence[int], shape: TreeShape, *, max_kv_len: int, mode: SamplingMode
    ) -> RoundOutput:
        """As RoundRunner.round; the output is overwritten by the next replay of the same key."""
        key = GraphKey(
            padded_size(len(slots), self._num_slots),
            padded_length(max_kv_len, self._max_kv_len),
            shape,
            mode,
        )
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(key)
        trash = self._runner.state.trash_slot
        padded = [*slots, *[trash] * (key.num_requests - len(slots))]
        captured.slots_B.copy_(torch.tensor(padded), non_blocking=True)
        captured.graph.replay()
        return _first(captured.output, len(slots))

    def _capture(self, key: GraphKey) -> _Captured:
        start = time.perf_counter()
        state = self._runner.state
        # Warm-up rounds run on the trash slot alone: nothing that anybody reads changes.
        slots_B = torch.full((key.num_requests,), state.trash_slot, device=state.device)

        def run() -> RoundOutput:
            return self._runner.round(slots_B, key.shape, max_kv_len=key.max_kv_len, mode=key.mode)

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        self.capture_seconds += time.perf_counter() - start
        return _Captured(graph, slots_B, output)


def _first(output: RoundOutput, count: int) -> RoundOutput:
    """Without the padding rows."""
    parts = (output.packed, output.logprob_id, output.logprob)
    packed, ids, values = (None if part is None else part[:count] for part in parts)
    assert packed is not None
    return RoundOutput(packed, ids, values)
