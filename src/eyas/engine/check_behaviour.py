"""The behavioural step of the check: tiny random instances of the very classes, run on the CPU.

An interface that is there can still be wrong. A target of the same depth and a draft with the same
flags, a few elements wide, show whether the right number of states of the right width is
captured, whether each is the residual stream at its boundary, and whether the draft takes them.

Shape suffixes: T tokens, F captured features, H hidden.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from eyas.models.config import DraftConfig, ModelConfig, RopeConfig
from eyas.models.findings import Findings

NUM_TOKENS, VOCAB = 3, 32


class _NoAttention:
    """Stores nothing and attends to nothing: what attention computes is not looked at here."""

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Ignore keys and values."""

    def attend(self, layer: int, q_THD: Tensor) -> Tensor:
        """Zeros [T, H * D]."""
        return torch.zeros_like(q_THD).flatten(1)


def report_behaviour(
    target_class: Any, target: ModelConfig, draft: DraftConfig | None, findings: Findings
) -> None:
    """Run tiny instances and report what they do wrong. draft: None tries the target alone."""
    generator = torch.Generator().manual_seed(0)
    small = _shrink(target)
    last = target.num_layers
    boundaries = draft.boundaries if draft is not None else tuple(sorted({0, last // 2, last}))
    tokens_T = torch.arange(NUM_TOKENS)
    try:
        model = _build(target_class, small, generator)
        features_TF, stream = _capture(model, tokens_T, boundaries, last)
        embed_TH = model.get_embed_and_head()[0][tokens_T]
        problem = _compare(features_TF, stream, boundaries, embed_TH)
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


@torch.inference_mode()
def _capture(
    model: Any, tokens_T: Tensor, boundaries: tuple[int, ...], last: int
) -> tuple[Tensor | None, dict[int, Tensor | None]]:
    """(features with all boundaries captured at once, [T, H] of each one captured alone, the
    first and the last of the model among them)."""
    attention = _NoAttention()

    def run(chosen: tuple[int, ...]) -> Tensor | None:
        model.set_eagle3_layers_to_capture(chosen)
        features: Tensor | None = model.forward(tokens_T, tokens_T, attention).features_TF
        return features

    ends = sorted({*boundaries, 0, last})
    return run(boundaries), {boundary: run((boundary,)) for boundary in ends}


def _compare(
    features_TF: Tensor | None,
    stream: dict[int, Tensor | None],
    boundaries: tuple[int, ...],
    embed_TH: Tensor,
) -> str | None:
    """What is wrong with captured states, None when all is well."""
    hidden_size = embed_TH.shape[1]
    found = None if features_TF is None else list(features_TF.shape)
    if features_TF is None or found != [NUM_TOKENS, len(boundaries) * hidden_size]:
        return f"{len(boundaries)} states of {hidden_size} are captured as {found}"
    for boundary, state_TH in stream.items():
        if state_TH is None or state_TH.shape != embed_TH.shape:
            return f"boundary {boundary} alone is not captured"
    if not torch.equal(_at(stream, 0), embed_TH):
        return "boundary 0 is not the embedding: another layer is captured than the one asked for"
    states = torch.split(features_TF, hidden_size, dim=1)
    for boundary, state_TH in zip(boundaries, states, strict=True):
        if not torch.equal(state_TH, _at(stream, boundary)):
            return f"boundary {boundary} is not in its place among the captured states"
    sums = {boundary: _at(stream, boundary).sum().item() for boundary in stream}
    if len(set(sums.values())) < len(sums):
        return f"boundaries {sorted(sums)} are not all different"
    return None


def _at(stream: dict[int, Tensor | None], boundary: int) -> Tensor:
    state_TH = stream[boundary]
    assert state_TH is not None
    return state_TH


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
    tied = small.decoder.tie_word_embeddings and not small.has_head
    if tied and model.lm_head.weight.data_ptr() != model.embed_tokens.weight.data_ptr():
        return "the draft's head is tied, and it takes another one than its embedding"
    tokens_T, attention = torch.arange(NUM_TOKENS), _NoAttention()
    hidden_TH = model.combine(features_TF)
    output = model.forward(tokens_T, hidden_TH, tokens_T, tokens_T, attention)
    shapes = [list(t.shape) for t in (hidden_TH, output.logits_TV, output.hidden_TH)]
    size = small.decoder.hidden_size
    wanted = [[NUM_TOKENS, size], [NUM_TOKENS, small.draft_vocab_size], [NUM_TOKENS, size]]
    if shapes != wanted:
        return f"the draft gives states and logits of {shapes}, expected {wanted}"
    return None
