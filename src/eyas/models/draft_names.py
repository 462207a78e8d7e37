"""Tensor names of EAGLE-3 drafts: every format's spelling as one canonical name."""

from __future__ import annotations

import re

_LEGACY_FC_NORMS = {"aux_norm_low": "0", "aux_norm_mid": "1", "aux_norm_high": "2"}
_CANONICAL = re.compile(
    r"fc\.(weight|bias)|input_norm\.weight|fc_norm\.\d+\.weight"
    r"|layers\.0\.(input_layernorm|hidden_norm|post_attention_layernorm)\.weight"
    r"|layers\.0\.self_attn\.[qkvo]_proj\.(weight|bias)"
    r"|layers\.0\.self_attn\.[qk]_norm\.weight"
    r"|layers\.0\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.(weight|bias)"
    r"|layers\.0\.self_attn\.(q_a_layernorm|q_b_proj|kv_a_layernorm|kv_b_proj)\.weight"
    r"|layers\.0\.mlp\.(gate|up|down)_proj\.(weight|bias)"
    r"|(norm|lm_head|embed_tokens)\.weight|d2t|t2d"
)


def plain_name(name: str) -> str:
    """A stored name without its format's spelling: no `model.` before it, `layers.N.` for
    `midlayer.`, and the present names of the norms before fc."""
    name = name.removeprefix("model.")
    name = re.sub(r"^midlayer\.(?!\d)", "layers.0.", name)
    name = re.sub(r"^midlayer\.(?=\d)", "layers.", name)
    head, _, rest = name.partition(".")
    if head in _LEGACY_FC_NORMS:
        name = f"fc_norm.{_LEGACY_FC_NORMS[head]}.{rest}"
    return name


def canonical_name(name: str) -> str | None:
    """The canonical name of a stored tensor, None for what no one-layer EAGLE-3 draft has."""
    name = plain_name(name)
    return name if _CANONICAL.fullmatch(name) else None
