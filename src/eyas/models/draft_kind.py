"""Telling drafts apart: the three EAGLE-3 formats, and the kinds that are refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from eyas.models.config import DraftFormat
from eyas.models.draft_names import plain_name
from eyas.models.findings import Findings

_USE_EAGLE3 = "use a one-layer EAGLE-3 draft"


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first named architecture, "" without one."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def draft_format(config: Mapping[str, Any]) -> DraftFormat:
    """The format of an EAGLE-3 draft; the first match wins."""
    if config.get("speculators_model_type") is not None:
        return "speculators"
    return "specforge" if "Eagle3" in architecture_of(config) else "safeailab"


def report_refused_kind(
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    findings: Findings,
    *,
    has_weights: bool,
) -> bool:
    """Add one finding if this is not a one-layer EAGLE-3 draft; whether it did.

    shapes: by stored name, empty when there are no weights to look at.
    """
    plain = {plain_name(name): shape for name, shape in shapes.items()}
    refusal = _by_config(config) or (_by_tensors(plain) if has_weights else None)
    if refusal is None:
        return False
    code, message, hint = refusal
    findings.error("draft", code, message, hint)
    return True


def _by_config(config: Mapping[str, Any]) -> tuple[str, str, str] | None:
    kind, architecture = config.get("speculators_model_type"), architecture_of(config)
    if kind == "peagle" or "PEagle" in architecture:
        return (
            "draft-kind-peagle",
            "this is a P-EAGLE draft (all draft tokens from one forward), which is not supported",
            _USE_EAGLE3,
        )
    if kind not in (None, "eagle3"):
        return "draft-kind", f"this is a speculators draft of the kind {kind!r}", _USE_EAGLE3
    layer = config.get("transformer_layer_config")
    layer_type = layer.get("model_type", "llama") if isinstance(layer, dict) else "llama"
    if kind is not None and layer_type not in ("llama", "qwen3"):
        return (
            "draft-kind",
            f"its decoder layer is of the type {layer_type!r}; llama and qwen3 are supported",
            _USE_EAGLE3,
        )
    eagle_config = config.get("eagle_config")
    if isinstance(eagle_config, dict) and eagle_config.get("use_aux_hidden_state") is False:
        return (
            "draft-kind-last-hidden",
            "this draft reads only the target's last hidden state (use_aux_hidden_state is false)",
            "use the version of the draft that reads several layers",
        )
    return None


def _by_tensors(plain: Mapping[str, tuple[int, ...]]) -> tuple[str, str, str] | None:
    if "mask_hidden" in plain:
        return (
            "draft-kind-peagle",
            "this is a P-EAGLE draft (it has a mask_hidden tensor), which is not supported",
            _USE_EAGLE3,
        )
    if any(name.startswith("parallel_draft_heads.") for name in plain):
        return "draft-kind", "this draft has parallel (Medusa) heads", _USE_EAGLE3
    num_layers = _num_stored_layers(plain)
    fc = plain.get("fc.weight")
    if fc is None or num_layers == 0:
        lacks = "fc.weight" if fc is None else "decoder layer"
        what = f"a whole model of {num_layers} layers" if num_layers > 1 else "something else"
        return (
            "draft-kind",
            f"this is no EAGLE-3 draft: it has no {lacks} (it looks like {what})",
            _USE_EAGLE3,
        )
    hidden_norm = any(re.fullmatch(r"layers\.\d+\.hidden_norm\.weight", name) for name in plain)
    if not hidden_norm and len(fc) == 2 and fc[1] == 2 * fc[0]:
        return (
            "draft-kind-eagle1",
            f"this is an EAGLE-1 or EAGLE-2 draft (fc is {list(fc)}: embedding and last hidden "
            "state, and there is no hidden_norm)",
            "use an EAGLE-3 draft of the same target",
        )
    if num_layers > 1:
        return (
            "draft-kind-layers",
            f"this EAGLE-3 draft has {num_layers} decoder layers; one is supported",
            _USE_EAGLE3,
        )
    return None


def _num_stored_layers(plain: Collection[str]) -> int:
    return len({m[1] for name in plain if (m := re.match(r"layers\.(\d+)\.", name))})
