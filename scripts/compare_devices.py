"""The embedded model with its draft on a GPU against the same on this machine's CPU.

Greedy and seeded answers in bf16, plain and drafted, alone and in batches. Two devices round
differently, so answers may part where two tokens are nearly equal: at each first difference the
scores of both tokens (logits, over the temperature, plus the noise of that position) are computed
in fp32 by transformers, and how far they lie apart is shown. Exits with 1 above --most.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from eyas import LLM, SamplingParams
from eyas.kernels import gumbel_noise

MODEL = "smollm2-135m"


class Scores:
    """What the rule of choice compares, from transformers in fp32."""

    def __init__(self, folder: str, device: str) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = model.to(device).eval()
        self._device = device

    @torch.inference_mode()
    def of(
        self, prefix: Sequence[int], tokens: Sequence[int], params: SamplingParams
    ) -> list[float]:
        """Scores, in logits, of these tokens as the next one."""
        ids = torch.tensor([prefix], device=self._device)
        logits = self._model(ids, logits_to_keep=1).logits[0, -1].double().cpu()
        chosen = torch.tensor(tokens)
        if params.temperature == 0:
            return logits[chosen].tolist()
        assert params.seed is not None
        noise = gumbel_noise(torch.tensor([params.seed]), torch.tensor([len(prefix)]), chosen)[0]
        return (logits[chosen] + params.temperature * noise).tolist()


def read_prompts(path: Path | None, count: int) -> list[str]:
    """The texts of a JSONL file's first turns, spread over the file; a few of our own without."""
    if path is None:
        topics = (
            "rivers",
            "prime numbers",
            "bread",
            "the moon",
            "chess",
            "volcanoes",
            "bees",
            "tea",
        )
        return [f"Write a short text about {t}, part {i // 8}." for i, t in enumerate(topics * 8)][
            :count
        ]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = rows[:: max(len(rows) // count, 1)][:count]
    return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]


def answers(
    device: str, draft: str | None, batch: int, prompts: Sequence[list[int]], params: Sequence[Any]
) -> list[list[int]]:
    """Token ids of all answers, run in batches of one size."""
    llm = LLM(
        MODEL,
        draft=draft,
        device=device,
        dtype="bfloat16",
        max_batch_size=batch,
        max_model_len=1024,
    )
    found = []
    for first in range(0, len(prompts), batch):
        some = slice(first, first + batch)
        found += [o.token_ids for o in llm.generate(prompts[some], params[some])]
    del llm
    gc.collect()
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers part; None where they do not."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def compare(arguments: argparse.Namespace) -> float:
    """Print a line a run and one a difference; the largest gap."""
    llm = LLM(MODEL, draft="none", device="cpu", dtype="bfloat16", max_model_len=1024)
    texts = read_prompts(arguments.prompts, arguments.count)
    prompts = [llm.tokenizer.render_chat([{"role": "user", "content": text}]) for text in texts]
    scores = Scores(str(llm._loaded.folder), arguments.device)
    del llm
    largest = 0.0
    for temperature in (0.0, 1.0):
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=arguments.new_tokens)
            for i in range(len(prompts))
        ]
        expected = answers("cpu", "none", arguments.cpu_batch, prompts, params)
        for draft in ("none", None):
            for batch in arguments.batch:
                got = answers(arguments.device, draft, batch, prompts, params)
                gaps = list(gaps_of(scores, prompts, expected, got, params))
                largest = max([largest, *gaps])
                name = "plain" if draft == "none" else "drafted"
                print(
                    f"T = {temperature:g}, {name}, batch {batch}: {len(prompts) - len(gaps)} of "
                    f"{len(prompts)} answers equal; gaps at first differences: "
                    f"{' '.join(f'{gap:.3f}' for gap in sorted(gaps)) or 'none'}",
                    flush=True,
                )
    return largest


def gaps_of(
    scores: Scores,
    prompts: Sequence[list[int]],
    expected: Sequence[list[int]],
    got: Sequence[list[int]],
    params: Sequence[SamplingParams],
) -> Iterator[float]:
    """How far apart the two tokens of each first difference lie."""
    for prompt, theirs, ours, one in zip(prompts, expected, got, params, strict=True):
        position = first_difference(ours, theirs)
        if position is None:
            continue
        first, second = scores.of(
            prompt + theirs[:position], [theirs[position], ours[position]], one
        )
        yield abs(first - second)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, help="JSONL with turns or prompt")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--cpu-batch", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--most", type=float, default=0.25, help="largest gap allowed, in logits")
    chosen = parser.parse_args()
    found = compare(chosen)
    print(f"largest gap {found:.3f} logits, {chosen.most} allowed")
    sys.exit(found > chosen.most)
