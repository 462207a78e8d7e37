"""Settings of `eyas train` beside those of the training itself."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

from eyas.train.prompts import Prompt
from eyas.train.stage_settings import (
    EvaluateSettings,
    Placement,
    RegenerateSettings,
    SelfPromptSettings,
)
from eyas.types import EyasError

_MAX_DRAFT_VOCAB = 32_000
_VOCAB_SHARE = 3  # a draft of a third of the target's tokens is seldom short of one

Stage = Literal["regenerate", "vocabulary", "train", "evaluate", "export"]
STAGES: tuple[Stage, ...] = ("regenerate", "vocabulary", "train", "evaluate", "export")


def _setting(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """What is asked of every stage but train. Raises EyasError on values out of range."""

    num_prompts: int | None = _setting(None, "Use that many of the prompts, drawn at random.")
    self_prompts: int = _setting(0, "Further prompts that the target tries to write itself.")
    num_validation: int = _setting(
        64, "Prompts set aside, never trained on, by which the best checkpoint is chosen."
    )
    max_prompt_tokens: int = _setting(512, "Leave out prompts with more tokens.")
    max_new_tokens: int = _setting(384, "Tokens of an answer to train on, at most.")
    greedy_share: float = _setting(0.3, "Share of conversations answered at temperature 0.")
    min_temperature: float = _setting(0.7, "The others are answered between this temperature ...")
    max_temperature: float = _setting(1.0, "... and this one.")
    shard_size: int = _setting(1000, "Prompts a shard: what an interruption can lose.")
    draft_vocab_size: int | None = _setting(
        None, "Tokens that the draft can propose (default: a third of the target's, 32000 at most)."
    )
    draft_intermediate_size: int | None = _setting(
        None, "Width of the draft's MLP (default: the target's)."
    )
    boundaries: tuple[int, ...] | None = _setting(
        None, "Target boundaries that the draft reads, for example 2,15,27 (default: the usual)."
    )
    eval_tokens: int = _setting(256, "Tokens of an answer in the evaluation.")
    chain: int = _setting(3, "Levels of the chain that is evaluated.")
    tree: tuple[int, ...] = _setting(
        (6, 8, 32), "The tree that is evaluated: levels, children a beam, nodes with the root."
    )
    temperatures: tuple[float, ...] = _setting((0.0, 1.0), "Temperatures of the evaluation.")
    format: Literal["specforge", "speculators"] = _setting(
        "specforge", "Layout of the exported draft."
    )
    device: Literal["auto", "cpu", "cuda"] = _setting("auto", "Where the models run.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto", "Dtype of the target; auto takes the checkpoint's."
    )
    batch_size: int | None = _setting(
        None, "Requests at once (default: up to 1024 on a GPU, 32 on a CPU, or what fits)."
    )
    template_settings: str | None = _setting(
        None, 'Further variables of the chat template, as JSON: {"enable_thinking": false}.'
    )
    seed: int = _setting(0, "Of everything that is drawn.")

    def __post_init__(self) -> None:
        if self.num_prompts is not None and self.num_prompts < 1:
            raise EyasError(f"num_prompts must be at least 1, not {self.num_prompts}")
        if self.self_prompts < 0 or self.num_validation < 1:
            raise EyasError("num_validation must be at least 1 and self_prompts not negative")
        if self.batch_size is not None and self.batch_size < 1:
            raise EyasError(f"batch_size must be at least 1, not {self.batch_size}")
        if self.draft_intermediate_size is not None and self.draft_intermediate_size < 1:
            raise EyasError(
                f"draft_intermediate_size must be at least 1, not {self.draft_intermediate_size}"
            )
        if len(self.tree) != 3:
            raise EyasError("a tree is three numbers: levels, children a beam, nodes, like 6,8,32")
        self.template_variables()
        self.regenerate()  # these raise on what they find out of range
        self.evaluate().modes()

    def selection(self, given: Sequence[Prompt]) -> dict[str, Any]:
        """What the prompts to train on depend on."""
        text = json.dumps([dataclasses.astuple(prompt) for prompt in given])
        names = ("seed", "num_prompts", "num_validation", "self_prompts", "template_settings")
        digest = hashlib.sha256(text.encode()).hexdigest()
        return {"given": digest, **{name: getattr(self, name) for name in names}}

    def regenerate(self) -> RegenerateSettings:
        """Those of stage 1."""
        names = [field.name for field in dataclasses.fields(RegenerateSettings)]
        return RegenerateSettings(**{name: getattr(self, name) for name in names})

    def write_prompts(self) -> SelfPromptSettings:
        """Those of prompts written by the target."""
        usual = SelfPromptSettings(count=self.self_prompts).max_tokens
        return SelfPromptSettings(
            count=self.self_prompts, max_tokens=min(usual, self.max_new_tokens), seed=self.seed
        )

    def evaluate(self) -> EvaluateSettings:
        """Those of stage 4."""
        levels, children, nodes = self.tree
        return EvaluateSettings(
            chain=self.chain,
            tree=(levels, children, nodes),
            temperatures=self.temperatures,
            max_new_tokens=self.eval_tokens,
            seed=self.seed,
        )

    def placement(self) -> Placement:
        """Where models run."""
        return Placement(
            device=self.device,
            dtype=self.dtype,
            batch_size=self.batch_size,
            template_settings=self.template_variables(),
        )

    def template_variables(self) -> dict[str, Any]:
        """template_settings, read."""
        try:
            variables = json.loads(self.template_settings or "{}")
        except ValueError as error:
            raise EyasError(f"template_settings is not valid JSON: {error}") from None
        if not isinstance(variables, dict):
            raise EyasError('template_settings must be an object, like {"enable_thinking": false}')
        return variables

    def vocabulary_size(self, target_vocab_size: int) -> int:
        """How many tokens the draft gets."""
        return self.draft_vocab_size or min(_MAX_DRAFT_VOCAB, target_vocab_size // _VOCAB_SHARE)
