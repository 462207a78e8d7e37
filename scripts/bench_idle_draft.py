"""What a draft costs that is loaded but switched off: alternating pairs of the same work.

Two engines on the embedded model, one without a draft and one whose rounds draft nothing; each
pair generates the same tokens with both, in alternating order. Prints the median of the ratios of
their speeds within the pairs (1 is no cost).

    python scripts/bench_idle_draft.py [PAIRS]
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from eyas import LLM, SamplingParams
from eyas.config import PLAIN

PROMPT = list(range(1000, 1128))
PARAMS = SamplingParams(max_tokens=33, temperature=0, ignore_eos=True)


def seconds(llm: LLM) -> float:
    """Time of one answer."""
    start = time.perf_counter()
    llm.generate([PROMPT], PARAMS)
    return time.perf_counter() - start


def main(num_pairs: int) -> None:
    """Run the pairs and print the ratio with its quartiles."""
    torch.set_num_threads(2)
    settings = {"max_batch_size": 1, "max_model_len": 512, "prefix_caching": False}
    without = LLM("smollm2-135m", draft="none", **settings)
    switched_off = LLM("smollm2-135m", **settings)
    switched_off.engine.tree = PLAIN
    for llm in (without, switched_off):
        seconds(llm)
    ratios = []
    for pair in range(num_pairs):
        order = (without, switched_off) if pair % 2 else (switched_off, without)
        times = {id(llm): seconds(llm) for llm in order}
        ratios.append(times[id(without)] / times[id(switched_off)])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"{num_pairs} pairs: speed with an idle draft / without {middle:.3f} ({low:.3f}-{high:.3f})"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
