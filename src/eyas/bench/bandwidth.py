"""How fast this machine reads memory, and how fast decoding could be at that rate."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch

from eyas.contract.attention import KVLayout
from eyas.models.config import ModelConfig

_BUFFER_BYTES = {"cpu": 2**29, "cuda": 2**31}  # far above any cache
# Calls timed together. On a GPU the wait for one alone is as long as a few per cent of it.
_CALLS_A_PASS = {"cpu": 1, "cuda": 10}


def best_seconds(work: Callable[[], object], device: torch.device, *, num_passes: int) -> float:
    """Seconds of one call in the fastest of several passes, as others use the machine too."""
    num_calls = _CALLS_A_PASS[device.type]
    seconds = []
    for _ in range(num_passes):
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(num_calls):
            work()
        _synchronize(device)
        seconds.append((time.perf_counter() - start) / num_calls)
    return min(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class ReadBandwidth:
    """Measures read bandwidth by summing a large buffer with torch's threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        num_elements = _BUFFER_BYTES[device.type] // 4
        self._buffer = torch.ones(num_elements, dtype=torch.float32, device=device)
        self.measure()  # the first touch is slower

    def measure(self, *, num_passes: int = 3) -> float:
        """Bytes a second of the best of a few passes, as others use the memory too."""
        seconds = best_seconds(self._buffer.sum, self._device, num_passes=num_passes)
        return self._buffer.nbytes / seconds


@dataclasses.dataclass(frozen=True)
class ReadCost:
    """Bytes that one plain decoding step must read at least.

    weight_bytes: once a step, whatever the batch. kv_bytes_per_token: for each token of context of
    each request.
    """

    weight_bytes: int
    kv_bytes_per_token: int

    def step_bytes(self, batch_size: int, context_tokens: float) -> float:
        """Bytes of one step of `batch_size` requests with this much context each, on average."""
        return self.weight_bytes + batch_size * context_tokens * self.kv_bytes_per_token

    def most_tokens_per_second(
        self, batch_size: int, context_tokens: float, bytes_per_second: float
    ) -> float:
        """Tokens a second of the batch if nothing but these reads took time."""
        return batch_size * bytes_per_second / self.step_bytes(batch_size, context_tokens)


def read_cost(
    config: ModelConfig, *, target_weight_bytes: int, layout: KVLayout, dtype_bytes: int
) -> ReadCost:
    """What a target reads in a step. The embedding counts only where it is the head too: of a
    table that is only looked up, a step reads a row a token."""
    embedding_bytes = config.vocab_size * config.hidden_size * dtype_bytes
    looked_up_only = 0 if config.tie_word_embeddings else embedding_bytes
    return ReadCost(
        weight_bytes=target_weight_bytes - looked_up_only,
        kv_bytes_per_token=layout.elements_per_token * dtype_bytes,
    )
