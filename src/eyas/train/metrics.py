"""What a training run reports, summed on the device until a log line is due.

Shape suffixes: S draft steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.train.loss import LossOutput
from eyas.train.processes import Processes


class Metrics:
    """Sums since the last report; on the device until then."""

    def __init__(self, num_draft_steps: int, like: Tensor) -> None:
        # Loss by draft step, correct rows by draft step; the last gradient norm.
        self._sums_2S = torch.zeros(2, num_draft_steps, dtype=like.dtype, device=like.device)
        self._norm = torch.zeros((), dtype=like.dtype, device=like.device)
        self._counts = [0] * num_draft_steps
        self._num_steps = self.num_tokens = 0

    def add(self, output: LossOutput) -> None:
        """One batch of this process."""
        self._sums_2S += torch.stack((output.loss_S, output.correct_S))

    def end_step(self, normalizer_S: list[int], norm: Tensor, num_tokens: int) -> None:
        """The step's counts, those of all processes."""
        self._counts = [a + b for a, b in zip(self._counts, normalizer_S, strict=True)]
        self._num_steps += 1
        self.num_tokens += num_tokens
        self._norm = norm

    def read(self, processes: Processes) -> tuple[list[float], list[float], float]:
        """(mean loss by draft step, accuracy by draft step, last gradient norm); waits for the
        device and starts anew."""
        processes.sum_(self._sums_2S)
        *rows, norm = (*self._sums_2S.tolist(), self._norm.item())
        losses = [total / self._num_steps for total in rows[0]]
        pairs = zip(rows[1], self._counts, strict=True)
        accuracies = [correct / max(count, 1) for correct, count in pairs]
        self._sums_2S.zero_()
        self._counts = [0] * len(self._counts)
        self._num_steps = 0
        return losses, accuracies, float(norm)
