"""The choice of attention: what cannot run is said, and what was not asked for is the reference."""

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
