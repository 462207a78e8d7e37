"""What can be benchmarked: Eyas without and with a draft, and transformers' `generate`.

All run in this process, on the same device, dtype and threads, greedily, and generate exactly the
number of tokens asked for: end tokens are like any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from eyas.bench.results import Sample
from eyas.bench.timing import TokenClock
from eyas.engine.llm import LLM
from eyas.types import EyasError, SamplingParams


class Contender(Protocol):
    """One way to generate."""

    @property
    def name(self) -> str:
        """As the report calls it."""

    @property
    def drafts(self) -> bool:
        """Whether it has an acceptance length."""

    def run(self, prompts: Sequence[Sequence[int]], num_new: int) -> Sample:
        """Generate `num_new` tokens for each prompt, all prompts in one batch."""


class EyasContender:
    """Eyas as `eyas.LLM` runs it, timed at the engine, without tokenizer and detokenizer.

    llm: without prefix cache, so that each run computes its prompts.
    """

    def __init__(self, llm: LLM, *, name: str, drafts: bool) -> None:
        self._llm, self.name, self.drafts = llm, name, drafts
        self._ids = itertools.count()

    def run(self, prompts: Sequence[Sequence[int]], num_new: int) -> Sample:
        """Submit the batch at once and step until all of it is done."""
        engine = self._llm.engine
        params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
        outputs: dict[str, list[int]] = {}
        rounds: dict[str, tuple[int, int]] = {}
        clock = TokenClock(len(prompts))
        for prompt in prompts:
            request_id = f"bench-{next(self._ids)}"
            engine.add(request_id, prompt, params)
            outputs[request_id] = []
        while engine.has_work:
            for step in engine.step():
                if step.error is not None:
                    raise EyasError(f"{self.name} failed in the benchmark: {step.error}")
                assert not step.num_cached_tokens, "a prompt was not computed"
                outputs[step.request_id] += step.new_token_ids
                rounds[step.request_id] = (step.num_rounds, step.num_round_tokens)
                clock.add_step(step)
        return Sample(list(outputs.values()), clock.rates(), [rounds[name] for name in outputs])


class TransformersContender:
    """`model.generate` of transformers with its key/value cache, as a user would call it."""

    name, drafts = "transformers", False

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]

        model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
        self._model = model.to(device).eval()
        self._device = device
        # Nothing of the checkpoint's own settings (end tokens, penalties, temperature) may act.
        settings: Any = GenerationConfig
        self._model.generation_config = settings(pad_token_id=0)

    def run(self, prompts: Sequence[Sequence[int]], num_new: int) -> Sample:
        """Generate greedily; shorter prompts are padded on the left, and the padding masked."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        clock = TokenClock(len(prompts))
        with torch.inference_mode():
            result = self._model.generate(
                ids.to(self._device),
                attention_mask=mask.to(self._device),
                max_new_tokens=num_new,
                do_sample=False,
                streamer=_Streamer(clock),
            )
        return Sample(result[:, longest:].tolist(), clock.rates())

    def logit_gap(self, prefix: Sequence[int], first: int, second: int) -> float:
        """How much the logit of token `first` is above that of `second` after a prefix."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(prefix)], device=self._device)).logits[0, -1]
        return float(logits[first].float() - logits[second].float())


class _Streamer:
    """transformers' streamer interface: the prompt comes first, then one token a request."""

    def __init__(self, clock: TokenClock) -> None:
        self._clock = clock
        self._num_puts = 0

    def put(self, token_ids: torch.Tensor) -> None:
        if self._num_puts:
            for request in range(token_ids.numel()):
                self._clock.add(1, str(request), with_prefill=self._num_puts == 1)
        self._num_puts += 1

    def end(self) -> None:
        """Nothing is held back."""
