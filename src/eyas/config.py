"""The engine's settings: one frozen dataclass, from which the command line's flags are made."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

# Targets with a draft that ships with Eyas: used unless another or none is asked for.
DEFAULT_DRAFTS = {"smollm2-135m": "smollm2-135m-eagle3"}
NO_DRAFT = "none"
MAX_TREE_NODES = 64  # so that a row's ancestors fit one int64 mask (D8)


class ConfigError(ValueError):
    """Settings that are unknown, out of range or contradict one another; says what to write."""


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """Shape of a draft tree. depth: draft levels; topk: children a beam; num_nodes: root included.

    A chain of K is TreeShape(K, 1, K + 1); plain decoding is TreeShape(0, 1, 1), the root alone.
    """

    depth: int
    topk: int
    num_nodes: int

    def __post_init__(self) -> None:
        if self.depth < 0 or self.topk < 1:
            raise ConfigError(f"a tree needs depth >= 0 and topk >= 1, not {self}")
        most = 1 + self.num_candidates
        if not self.depth + 1 <= self.num_nodes <= min(most, MAX_TREE_NODES):
            raise ConfigError(
                f"a tree of depth {self.depth} and topk {self.topk} has between {self.depth + 1} "
                f"and {min(most, MAX_TREE_NODES)} nodes with its root, not {self.num_nodes}"
            )
        if self.num_draft_rows > MAX_TREE_NODES:
            raise ConfigError(
                f"depth {self.depth} with topk {self.topk} runs {self.num_draft_rows} draft rows; "
                f"(depth - 1) x topk may be at most {MAX_TREE_NODES}"
            )

    @property
    def num_candidates(self) -> int:
        """Candidates before pruning: topk + (depth - 1) × topk², without the root."""
        return self.topk + (self.depth - 1) * self.topk**2 if self.depth else 0

    @property
    def num_draft_rows(self) -> int:
        """Rows that the draft runs in a round beyond the extend: (depth - 1) × topk."""
        return max(self.depth - 1, 0) * self.topk

    @property
    def is_chain(self) -> bool:
        """True for a chain, plain decoding included."""
        return self.topk == 1


PLAIN = TreeShape(0, 1, 1)


def _setting(default: Any, text: str, *, alias: str | None = None) -> Any:
    """alias: a second name of the flag."""
    return dataclasses.field(default=default, metadata={"help": text, "alias": alias})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every setting of the engine. Raises ConfigError when values contradict one another."""

    model: str = dataclasses.field(
        metadata={"help": "Target: a local folder, a hub id, or smollm2-135m."}
    )
    draft: str | None = _setting(
        None,
        "EAGLE-3 draft: a local folder, a hub id, or none (default: the draft that comes with the "
        "target, if one does).",
    )
    device: Literal["auto", "cpu", "cuda"] = _setting("auto", "Where the models run.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto", "Dtype of weights and KV cache; auto takes the checkpoint's."
    )
    draft_dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto", "Dtype of the draft and its KV cache; auto takes what the target runs in."
    )
    tensor_parallel_size: int = _setting(
        1, "Ranks (GPUs) that hold one model together.", alias="--tp"
    )
    expert_parallel: bool = _setting(
        False, "Each rank holds some of the experts, not a part of each."
    )
    watchdog: float | None = _setting(
        None,
        "Seconds without progress after which several ranks are given up (default 60; 0: never).",
    )
    num_speculative_tokens: int | None = _setting(
        None, "Draft levels K a round (default 3 with a draft; 0 switches drafting off)."
    )
    topk: int = _setting(1, "Children a tree beam; 1 is a chain.")
    num_tree_nodes: int | None = _setting(
        None, "Nodes verified a round with the root (default: all, at most 64)."
    )
    max_batch_size: int = _setting(16, "Requests that run at once.")
    max_model_len: int | None = _setting(None, "Longest prompt + answer; default: the model's own.")
    page_size: int = _setting(16, "Tokens a KV page.")
    kv_cache_tokens: int | None = _setting(
        None, "Tokens the KV cache holds; default: the whole batch at full length, or what fits."
    )
    prefill_chunk_tokens: int = _setting(512, "Prompt tokens processed between two rounds.")
    prefix_caching: bool = _setting(True, "Reuse the KV pages of prompts that begin alike.")
    images: bool = _setting(
        True, "Take images where the model does; without, its vision tower is not loaded."
    )
    cuda_graphs: bool = _setting(True, "On a GPU, replay rounds as CUDA graphs.")
    attention_backend: Literal["auto", "torch", "triton"] = _setting(
        "auto", "Attention: Triton's kernels (auto: where a trial shows them right) or torch."
    )
    simulate_acceptance: tuple[float, ...] | None = _setting(
        None,
        "Benchmarks only, the output is not the model's: tokens a round on average (3.0), or the "
        "chance of each draft position given the one before (0.8,0.7,0.6).",
    )
    run_ahead: int = _setting(1, "Rounds launched before the last one's tokens are read: 0 or 1.")
    draft_boundaries: tuple[int, ...] | None = _setting(
        None, "Override the target boundaries that the draft reads, for example 2,15,27."
    )
    draft_norm_output: bool | None = _setting(
        None, "Override whether the draft feeds back its normed hidden state (EAGLE-3.1)."
    )
    acceptance_probe: bool = _setting(
        True,
        "Try the draft on a short text at start-up, and warn where the target's neighbouring "
        "boundaries suit it better.",
    )

    def __post_init__(self) -> None:
        for name in (
            "max_batch_size",
            "page_size",
            "prefill_chunk_tokens",
            "tensor_parallel_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
        for name in ("max_model_len", "kv_cache_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if self.draft_boundaries == ():
            raise ConfigError("--draft-boundaries names none: write 2,15,27, or leave it out")
        if self.run_ahead not in (0, 1):
            raise ConfigError(f"--run-ahead must be 0 or 1, not {self.run_ahead}")
        if self.watchdog is not None and self.watchdog < 0:
            raise ConfigError(f"--watchdog must be 0 or more seconds, not {self.watchdog:g}")
        if self.watchdog is not None and self.tensor_parallel_size == 1:
            raise ConfigError("--watchdog watches several ranks: add --tp, or leave it out")
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError("--expert-parallel needs several ranks: add --tp, or leave it out")
        if self.draft_name is None:
            self._refuse_draft_settings()
        self.tree_shape()  # raises on a shape that cannot be
        self.acceptance_rates()

    @property
    def draft_name(self) -> str | None:
        """The draft to use: the one asked for, else the target's own; None for plain decoding."""
        if self.draft is None:
            return DEFAULT_DRAFTS.get(self.model)
        return None if self.draft == NO_DRAFT else self.draft

    def _refuse_draft_settings(self) -> None:
        needs_draft = {
            "num_speculative_tokens": self.num_speculative_tokens not in (None, 0),
            "topk": self.topk != 1,
            "num_tree_nodes": self.num_tree_nodes not in (None, 1),
            "draft_dtype": self.draft_dtype != "auto",
            "draft_boundaries": self.draft_boundaries is not None,
            "draft_norm_output": self.draft_norm_output is not None,
            "simulate_acceptance": self.simulate_acceptance is not None,
        }
        for name, is_set in needs_draft.items():
            if is_set:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} needs a draft: add --draft, or leave {flag} out")

    def tree_shape(self) -> TreeShape:
        """The shape of a speculative round; PLAIN without a draft or with K = 0.

        Raises ConfigError on a shape that cannot be.
        """
        depth = self.num_speculative_tokens
        if depth is None:
            depth = 3 if self.draft_name is not None else 0
        if depth == 0:
            if self.topk != 1 or self.num_tree_nodes not in (None, 1):
                raise ConfigError(
                    "--topk and --num-tree-nodes shape a tree, and --num-speculative-tokens 0 "
                    "drafts none: leave them out"
                )
            return PLAIN
        num_nodes = self.num_tree_nodes
        if num_nodes is None:
            whole = 1 + self.topk + (depth - 1) * self.topk**2
            num_nodes = min(whole, MAX_TREE_NODES)
        return TreeShape(depth, self.topk, num_nodes)

    def acceptance_rates(self) -> tuple[float, ...] | None:
        """Simulated chance of each draft position given the one before; None: the real ones.

        Raises ConfigError where they do not fit the tree's depth.
        """
        given, depth = self.simulate_acceptance, self.tree_shape().depth
        if given is None:
            return None
        if len(given) == 1 and given[0] >= 1:
            return (_rate_for_length(given[0], depth),) * depth
        if len(given) != depth or not all(0 <= rate <= 1 for rate in given):
            raise ConfigError(
                f"--simulate-acceptance takes one length from 1 to {depth + 1}, or {depth} chances "
                f"from 0 to 1 (one a draft level), not {','.join(map(str, given))}"
            )
        return given


def _rate_for_length(length: float, depth: int) -> float:
    """The rate r with 1 + r + r² + … + r^depth = length, by bisection."""
    if not 1 <= length <= depth + 1:
        raise ConfigError(
            f"--simulate-acceptance {length} is out of reach: a round of {depth} draft levels "
            f"emits 1 to {depth + 1} tokens"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        reached = sum(middle**level for level in range(depth + 1))
        low, high = (middle, high) if reached < length else (low, middle)
    return high
