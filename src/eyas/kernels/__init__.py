"""Device kernels. Callers use this package's names; which implementation runs is decided here.

`reference`, `sampling` and `moe` (products by expert, imported by its own name) are torch, on any
device: the oracle of each other implementation. `dispatch` lets `native` (C, for few rows on a
CPU) take what it serves.
"""

from eyas.kernels.dispatch import (
    add_rms_norm,
    choose_tokens,
    copy_cache_rows,
    few_row_linear,
    has_native,
    has_triton,
    pair_norm,
    plan_attention,
    plan_rope_write,
    plan_tree_rows,
    rms_norm,
    silu_mul,
)
from eyas.kernels.native_attention import FewRowsAttention, TreeRows
from eyas.kernels.reference import (
    FINISH_LENGTH,
    FINISH_STOP,
    NO_FINISH,
    apply_rope,
    copy_kv_rows,
    cut_emitted,
    gumbel_noise,
    walk_tree,
)
from eyas.kernels.sampling import SamplingMode, apply_penalties, token_logprobs, truncate

__all__ = [
    "FINISH_LENGTH",
    "FINISH_STOP",
    "NO_FINISH",
    "FewRowsAttention",
    "SamplingMode",
    "TreeRows",
    "add_rms_norm",
    "apply_penalties",
    "apply_rope",
    "choose_tokens",
    "copy_cache_rows",
    "copy_kv_rows",
    "cut_emitted",
    "few_row_linear",
    "gumbel_noise",
    "has_native",
    "has_triton",
    "pair_norm",
    "plan_attention",
    "plan_rope_write",
    "plan_tree_rows",
    "rms_norm",
    "silu_mul",
    "token_logprobs",
    "truncate",
    "walk_tree",
]
