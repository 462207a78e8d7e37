"""Learning rate by step: linear warm-up, then half a cosine."""

from __future__ import annotations

import math


def learning_rate(
    step: int, *, num_steps: int, peak: float, final_ratio: float, warmup_ratio: float
) -> float:
    """The rate of step 1..num_steps: up to `peak` over the first warmup_ratio of the steps, then
    down to peak × final_ratio at the last one. A pure function: resuming cannot restart it."""
    num_warmup = math.ceil(warmup_ratio * num_steps)
    if step <= num_warmup:
        return peak * step / num_warmup
    share = (step - num_warmup) / max(num_steps - num_warmup, 1)
    cosine = (1 + math.cos(math.pi * share)) / 2
    return peak * (final_ratio + (1 - final_ratio) * cosine)
