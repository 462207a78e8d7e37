"""The choice of attention: what cannot run is said, and what was not asked for is the reference."""

import importlib.util

import pytest
import torch

from eyas.attention.choose import TORCH, choose_backend
from eyas.contract.attention import KVLayout
from eyas.types import EyasError

CPU, LAYOUT = torch.device("cpu"), KVLayout(2, 2, 16, 16)


def test_a_cpu_takes_the_reference() -> None:
    assert choose_backend("auto", LAYOUT, torch.float32, CPU) is TORCH
    assert choose_backend("torch", LAYOUT, torch.float32, CPU) is TORCH


def test_triton_on_a_cpu_is_refused_with_the_reason() -> None:
    with pytest.raises(EyasError, match="--attention-backend triton cannot run here.*need a GPU"):
        choose_backend("triton", LAYOUT, torch.float32, CPU)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is optional")
def test_heads_without_a_kernel_get_the_reference_itself() -> None:
    """Not the reference inside of the other backend, whose graphs claim to serve any length."""
    wide = KVLayout(2, 2, 512, 512)
    assert choose_backend("auto", wide, torch.bfloat16, torch.device("cuda")) is TORCH
