"""The behavioural step of the check: tiny random instances of the very classes, run on the CPU.

An interface that is there can still be wrong. A target of the same depth and a draft with the same
flags, a few elements wide, show whether the right number of states of the right width is
captured, whether each is the residual stream at its boundary, and whether the draft takes them.

Shape suffixes: T tokens, F captured features, H hidden.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from eyas.contract.attention import KVLayout
from eyas.models.config import DraftConfig, ModelConfig, RopeConfig
from eyas.models.findings import Findings

NUM_TOKENS, VOCAB = 3, 32
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")


class _NoAttention:
    """Stores nothing and attends to nothing: what attention computes is not looked at here."""

    def __init__(self, layout: KVLayout) -> None:
        self._value_dim = layout.value_dim

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Ignore keys and values."""

    def attend(self, layer: int, q_THD: Tensor, *, scale: float | None = None) -> Tensor:
        """Zeros [T, H * Dv]."""
        return q_THD.new_zeros(len(q_THD), q_THD.shape[1] * self._value_dim)


def report_behaviour(
    target_class: Any, target: ModelConfig, draft: DraftConfig | None, findings: Findings
) -> None:
    """Run tiny instances and report what they do wrong. draft: None tries the target alone."""
    generator = torch.Generator().manual_seed(0)
    last = target.num_layers
    boundaries = draft.boundaries if draft is not None else tuple(sorted({0, last // 2, last}))
    tokens_T = torch.arange(NUM_TOKENS)
    try:
        model = _build(target_class, _shrink(target), generator)
        features_TF = _capture(model, tokens_T, boundaries)
        embed_TH = model.get_embed_and_head()[0][tokens_T]
        problem = _compare(model, tokens_T, features_TF, boundaries, embed_TH)
        for boundary in sorted({*boundaries, 0, last}):
            problem = problem or _misplaced(model, tokens_T, boundary, embed_TH)
        if problem is None and draft is not None:
            problem = _run_draft(model, draft, features_TF, generator)
    except Exception as error:  # whatever a model raises is what is to be reported
        problem = f"a tiny instance raises {type(error).__name__}: {error}"
    if problem is not None:
        name = getattr(target_class, "__name__", str(target_class))
        findings.error(
            "target",
            "capture-wrong",
            f"{name}: {problem}",
            "this is a fault of the engine and not of the checkpoint: report it",
        )


def _shrink(model: ModelConfig) -> ModelConfig:
    latent, experts = model.latent, model.experts
    if latent is not None:
        latent = dataclasses.replace(
            latent,
            q_lora_rank=latent.q_lora_rank and 4,
            kv_lora_rank=6,
            nope_head_dim=2,
            rope_head_dim=4,
            v_head_dim=4,
        )
    if experts is not None:
        experts = dataclasses.replace(
            experts,
            num_experts=4,
            num_experts_per_token=2,
            intermediate_size=4,
            shared_size=4 if experts.shared_size else 0,
            num_groups=1 if experts.num_groups == experts.topk_groups else 2,
            topk_groups=1,
        )
    return dataclasses.replace(
        model,
        hidden_size=16,
        intermediate_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        vocab_size=VOCAB,
        rope=RopeConfig(),
        max_position_embeddings=NUM_TOKENS,
        latent=latent,
        experts=experts,
        quant=None,
        vision=None,
    )


def _build(model_class: Any, config: Any, generator: torch.Generator) -> Any:
    model: nn.Module = model_class(
        config, dtype=torch.float32, device="cpu", max_model_len=NUM_TOKENS
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
        for buffer in model.buffers():
            buffer.zero_()
    return model


@torch.no_grad()
def _capture(model: Any, tokens_T: Tensor, boundaries: tuple[int, ...]) -> Tensor | None:
    """Features of the boundaries, lowest first."""
    model.set_eagle3_layers_to_capture(boundaries)
    attention = _NoAttention(model.kv_layout)
    features: Tensor | None = model.forward(tokens_T, tokens_T, attention).features_TF
    return features


def _compare(
    model: Any,
    tokens_T: Tensor,
    features_TF: Tensor | None,
    boundaries: tuple[int, ...],
    embed_TH: Tensor,
) -> str | None:
    """What is wrong with the number and the order of captured states, None when all is well."""
    hidden_size = embed_TH.shape[1]
    found = None if features_TF is None else list(features_TF.shape)
    if features_TF is None or found != [NUM_TOKENS, len(boundaries) * hidden_size]:
        return f"{len(boundaries)} states of {hidden_size} are captured as {found}"
    states = torch.split(features_TF, hidden_size, dim=1)
    for boundary, state_TH in zip(boundaries, states, strict=True):
        alone_TH = _capture(model, tokens_T, (boundary,))
        if alone_TH is None or not torch.equal(state_TH, alone_TH):
            return f"boundary {boundary} is not in its place among the captured states"
    return None


def _misplaced(model: Any, tokens_T: Tensor, boundary: int, embed_TH: Tensor) -> str | None:
    """Whether a boundary is the residual stream with exactly the layers below it in it.

    A layer whose weights are all zero passes the stream on as it is.
    """
    last = model.num_layers

    def state(active: range, at: int = boundary) -> Tensor | None:
        with _only(model, active):
            return _capture(model, tokens_T, (at,))

    def same(one: Tensor | None, other: Tensor | None) -> bool:
        return one is not None and other is not None and torch.equal(one, other)

    if not same(state(range(boundary, last)), embed_TH):
        return (
            f"boundary {boundary} is not the residual stream, or holds more than the layers below "
            "it"
        )
    if boundary and same(state(range(boundary - 1, boundary)), embed_TH):
        return f"boundary {boundary} does not hold what layer {boundary - 1} adds"
    below = range(boundary)
    if not same(state(below), state(below, last)):
        return f"boundary {boundary} does not hold all that the layers below it add"
    return None


@contextlib.contextmanager
def _only(model: nn.Module, active: range) -> Iterator[None]:
    """Zero weights in all layers but the active ones, for a while."""
    silenced = [
        parameter
        for name, parameter in model.named_parameters()
        if (match := _LAYER.match(name)) and int(match[1]) not in active
    ]
    saved = [parameter.detach().clone() for parameter in silenced]
    with torch.no_grad():
        for parameter in silenced:
            parameter.zero_()
        yield
        for parameter, value in zip(silenced, saved, strict=True):
            parameter.copy_(value)


@torch.inference_mode()
def _run_draft(
    target: Any, draft: DraftConfig, features_TF: Tensor | None, generator: torch.Generator
) -> str | None:
    from eyas.models.eagle3 import Eagle3Draft

    assert features_TF is not None
    width = features_TF.shape[1] // len(draft.boundaries)
    small = dataclasses.replace(
        draft,
        decoder=_shrink(draft.decoder),
        target_hidden_size=width,
        draft_vocab_size=VOCAB // 2 if draft.has_head else VOCAB,
        has_d2t=draft.has_head,
    )
    model = _build(Eagle3Draft, small, generator)
    model.share_with_target(target)
    tokens_T, attention = torch.arange(NUM_TOKENS), _NoAttention(model.kv_layout)
    hidden_TH = model.combine(features_TF)
    output = model.forward(tokens_T, hidden_TH, tokens_T, tokens_T, attention)
    shapes = [list(t.shape) for t in (hidden_TH, output.logits_TV, output.hidden_TH)]
    size = small.decoder.hidden_size
    wanted = [[NUM_TOKENS, size], [NUM_TOKENS, small.draft_vocab_size], [NUM_TOKENS, size]]
    if shapes != wanted:
        return f"the draft gives states and logits of {shapes}, expected {wanted}"
    return None
