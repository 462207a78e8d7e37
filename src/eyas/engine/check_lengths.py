"""Lengths: what the rotary embeddings of target and draft reach, and windows of attention."""

from __future__ import annotations

from eyas.models.config import DraftConfig, ModelConfig
from eyas.models.findings import Findings
from eyas.models.target_config import position_limit

MIN_MODEL_LEN = 2  # one token of prompt and one of answer


def report_lengths(
    target: ModelConfig,
    draft: DraftConfig | None,
    *,
    asked: int | None,
    served: int,
    findings: Findings,
) -> str:
    """Report what ends before the served length; returns what to say of the positions.

    asked: --max-model-len. served: the length that will be served (the plan may have cut it).
    """
    limit = position_limit(target)
    if asked is not None and asked > limit:
        findings.error(
            "settings",
            "model-length",
            f"--max-model-len {asked} is above the {limit} positions of the target's rotary "
            "embedding",
            f"use at most {limit}, or a config.json with a rope scaling that reaches further",
        )
    if served < MIN_MODEL_LEN:
        findings.error(
            "settings",
            "model-length",
            f"a model length of {served} has no room for a prompt and an answer",
            f"set --max-model-len to {MIN_MODEL_LEN} at least",
        )
    text = f"target {_describe(target, served)}"
    _report_window("target", target, served, findings)
    if draft is not None:
        _report_window("draft", draft.decoder, served, findings)
        _report_draft(draft.decoder, served, findings)
        text += f"; draft {_describe(draft.decoder, served)}"
    return text


def _describe(model: ModelConfig, served: int) -> str:
    """How far a rotary embedding was made for, and what serving this length makes of it."""
    rope, limit = model.rope, position_limit(model)
    text = f"{limit} positions (rope base {rope.theta:g}, {_kind(model)})"
    if served > model.max_position_embeddings and rope.kind == "dynamic":
        # The base grows with the length of a sequence elsewhere, which would turn cached keys.
        text += f", its base stretched once for {served}, for shorter requests too"
    elif served > limit:
        text += f", its table extended to {served}"
    return text


def _kind(model: ModelConfig) -> str:
    rope = model.rope
    if rope.kind == "default":
        return "no scaling"
    factor = "" if rope.factor is None else f" ×{rope.factor:g}"
    original = rope.original_max_position_embeddings
    return f"{rope.kind}{factor}" + (f" from {original}" if original is not None else "")


def _report_draft(decoder: ModelConfig, served: int, findings: Findings) -> None:
    """Without a scaling the number is nominal (published drafts say 2048 whatever their target):
    the rotation goes on. A scaling was made for a length of its own."""
    limit = position_limit(decoder)
    if decoder.rope.kind == "default" or served <= limit:
        return
    findings.warn(
        "draft",
        "draft-positions",
        f"the draft's rope scaling ({_kind(decoder)}) reaches {limit} positions and the model "
        f"length is {served}: past {limit} fewer of its tokens may be accepted; the output does "
        "not change",
        f"set --max-model-len {limit} if no request is longer, or use a draft made for {served}",
    )


def _report_window(subject: str, model: ModelConfig, served: int, findings: Findings) -> None:
    window = model.sliding_window
    if window is not None and window < served:
        findings.error(
            subject,
            "sliding-window",
            f"the {subject} attends within a window of {window} tokens, and the model length is "
            f"{served}; windows are not supported yet",
            f"set --max-model-len {window}, where the window has no effect",
        )
