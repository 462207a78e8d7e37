# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""Programmatic dependent launch for Triton kernels, behind one switch.

With it a kernel starts while the one before it is still ending, fetches what does not depend on
that one (its weights), and waits for it only then. A kernel that takes part calls `let_next_start`
first and `wait_for_inputs` before it reads what other kernels wrote and before it writes anything;
with the switch off both compile to nothing. A kernel that takes no part is ordered as ever.

EYAS_PDL=0 turns it off. Where it is not refused, a probe finds out whether the device has it.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_forced: bool | None = None


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel may begin as soon as every program of this one has come here."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Nothing after this runs before the kernels before this one have ended."""
    if PDL:
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Bring the line of 128 bytes at each pointer into the L2 cache. Not in the interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _probe_kernel(out_ptr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    tl.store(out_ptr, tl.load(out_ptr) + 1)


def use_pdl(enabled: bool | None) -> None:
    """Force dependent launch on or off; None leaves it to EYAS_PDL and the probe. Kernels that
    were captured keep what they were captured with."""
    global _forced
    _forced = enabled


def launch_options() -> dict[str, Any]:
    """Arguments of a launch: PDL for the kernel, and what the launcher needs for it."""
    enabled = _pdl_works() if _forced is None else _forced
    return {"PDL": True, "launch_pdl": True} if enabled else {"PDL": False}


@functools.cache
def _pdl_works() -> bool:
    """Whether two dependent launches compile, run and see one another's result here."""
    is_interpreted = not isinstance(_probe_kernel, triton.runtime.JITFunction)
    if os.environ.get("EYAS_PDL", "1") == "0" or is_interpreted or not torch.cuda.is_available():
        return False
    try:
        counter = torch.zeros(1, dtype=torch.int32, device="cuda")
        for _ in range(2):
            _probe_kernel[(1,)](counter, PDL=True, launch_pdl=True)
        return int(counter.item()) == 2
    except Exception:  # a compiler or driver without it says so in many ways
        return False
