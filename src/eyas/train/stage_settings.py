"""Settings of the stages. Nothing here imports torch, so that the command line starts quickly."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any, Literal

from eyas.config import TreeShape
from eyas.types import EyasError, SamplingParams

_TEMPERATURE_STEP = 20  # temperatures are multiples of 1/20, for a readable report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where and how models run, the same in every stage. batch_size: requests at once, None for
    the most that is useful and fits. template_settings: further variables of the chat template."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    batch_size: int | None = None
    template_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerateSettings:
    """How answers are made. Raises EyasError on values out of range.

    max_prompt_tokens: longer prompts are left out, earlier turns counted in. max_new_tokens: of one
    answer. greedy_share: of the conversations; the others have a temperature between
    min_temperature and max_temperature. shard_size: prompts a shard.
    """

    max_prompt_tokens: int = 512
    max_new_tokens: int = 384
    greedy_share: float = 0.3
    min_temperature: float = 0.7
    max_temperature: float = 1.0
    seed: int = 0
    shard_size: int = 1000

    def __post_init__(self) -> None:
        if not 0 <= self.greedy_share <= 1:
            raise EyasError(f"greedy_share must be between 0 and 1, not {self.greedy_share}")
        if not 0 < self.min_temperature <= self.max_temperature:
            raise EyasError("temperatures must be above 0, the lower one first")
        if min(self.max_prompt_tokens, self.max_new_tokens, self.shard_size) < 1:
            raise EyasError("max_prompt_tokens, max_new_tokens and shard_size must be at least 1")

    def params(self, index: int) -> SamplingParams:
        """How prompt number `index` is answered."""
        chance = random.Random(f"{self.seed}/{index}")
        seed = chance.getrandbits(63)
        if chance.random() < self.greedy_share:
            temperature = 0.0
        else:
            low, high = self.min_temperature, self.max_temperature
            drawn = chance.uniform(low, high)
            temperature = min(max(round(drawn * _TEMPERATURE_STEP) / _TEMPERATURE_STEP, low), high)
        return SamplingParams(
            max_tokens=self.max_new_tokens, temperature=temperature, seed=seed, speculation=False
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfPromptSettings:
    """count: prompts to try; those that do not end, repeat themselves or others, or are shorter
    than min_characters are dropped. seed: prompt i is drawn with seed + i."""

    count: int
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 0.95
    min_characters: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise EyasError(f"the number of prompts to write must be at least 1, not {self.count}")


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to run: a shape of the draft's tree, and a temperature."""

    name: str
    shape: TreeShape
    temperature: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """What is measured. chain: draft levels of the chain. tree: (levels, children a beam, nodes
    with the root). temperatures: each with the chain and with the tree. max_new_tokens: of one
    answer. Raises EyasError on values out of range."""

    chain: int = 3
    tree: tuple[int, int, int] = (6, 8, 32)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_new_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2:
            raise EyasError("max_new_tokens must be at least 2: the prefill gives the first token")
        if not self.temperatures:
            raise EyasError("give at least one temperature to evaluate at")
        if self.chain > self.tree[0]:
            raise EyasError(
                f"the tree's {self.tree[0]} levels must be at least the chain's {self.chain}"
            )

    @property
    def tree_shape(self) -> TreeShape:
        """The tree."""
        return TreeShape(*self.tree)

    def modes(self) -> list[Mode]:
        """All that is measured, in order."""
        depth, _, nodes = self.tree
        shapes = {
            f"chain of {self.chain}": TreeShape(self.chain, 1, self.chain + 1),
            f"tree of {nodes}, depth {depth}": self.tree_shape,
        }
        return [
            Mode(f"{name}, T = {temperature:g}", shape, temperature)
            for temperature in self.temperatures
            for name, shape in shapes.items()
        ]
