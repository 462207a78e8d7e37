"""One rank against several on the devices of this machine: the same answers, and how fast.

    python scripts/compare_ranks.py [--tp 2] [--shape llama-3.1-8b] [--dtype float32]

Random weights in a real model's shape, with a draft: greedy and seeded answers by chain, alone and
in a batch. In float32 they are to be equal; in bfloat16, sums over ranks round differently, and
answers part where two tokens are nearly equal: then the first differences are counted. Exits with 1
when more than --most answers differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from random_checkpoint import write_checkpoints

from eyas import LLM, SamplingParams

BATCH, PROMPT_TOKENS = 8, 64


def answers(pair: tuple[Path, Path], **settings: Any) -> tuple[list[list[int]], float]:
    """(tokens of each answer, tokens a second of the batch)."""
    target, draft = pair
    llm = LLM(
        str(target),
        draft=str(draft),
        max_model_len=512,
        max_batch_size=BATCH,
        acceptance_probe=False,
        **settings,
    )
    prompts = [[(31 * i + 7 * n) % 1000 for n in range(PROMPT_TOKENS)] for i in range(BATCH)]
    options: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}
    found = [llm.generate(prompts[0], SamplingParams(temperature=0, **options))[0].token_ids]
    for temperature in (0.0, 1.0):
        params = [SamplingParams(temperature=temperature, seed=i, **options) for i in range(BATCH)]
        llm.generate(prompts, params)  # graphs and caches are there afterwards
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        found += [output.token_ids for output in outputs]
    llm.close()
    return found, sum(map(len, found[-BATCH:])) / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--most", type=int, default=0, help="answers that may differ")
    given = parser.parse_args()
    settings = {"dtype": given.dtype, "attention_backend": given.attention_backend}
    with tempfile.TemporaryDirectory() as folder:
        pair = write_checkpoints(Path(folder), shape=given.shape, num_shards=2)
        alone, alone_speed = answers(pair, **settings)
        together, speed = answers(pair, tensor_parallel_size=given.tp, **settings)
    different = sum(a != b for a, b in zip(alone, together, strict=True))
    firsts = [
        next(n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        for a, b in zip(alone, together, strict=True)
        if a != b
    ]
    print(f"{given.shape}, {given.dtype}: {len(alone) - different} of {len(alone)} answers equal")
    print(f"first differences at: {firsts}")
    print(f"tokens/s in a batch of {BATCH}: one rank {alone_speed:.0f}, {given.tp} {speed:.0f}")
    return int(different > given.most)


if __name__ == "__main__":
    sys.exit(main())
