"""Device kernels. Callers use this package's names; which implementation runs is decided here.

`reference` holds the torch implementation of every kernel: the only one on a CPU, and the oracle
of each Triton kernel.
"""

from eyas.kernels.reference import (
    FINISH_LENGTH,
    FINISH_STOP,
    NO_FINISH,
    apply_rope,
    choose_tokens,
    copy_kv_rows,
    cut_emitted,
    gumbel_noise,
    rms_norm,
    silu_mul,
    walk_tree,
)
from eyas.kernels.sampling import SamplingMode, apply_penalties, token_logprobs, truncate

__all__ = [
    "FINISH_LENGTH",
    "FINISH_STOP",
    "NO_FINISH",
    "SamplingMode",
    "apply_penalties",
    "apply_rope",
    "choose_tokens",
    "copy_kv_rows",
    "cut_emitted",
    "gumbel_noise",
    "rms_norm",
    "silu_mul",
    "token_logprobs",
    "truncate",
    "walk_tree",
]
