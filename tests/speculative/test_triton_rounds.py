"""Whole rounds in Triton are the torch ones; and what enters a slot in one packed row."""

import copy
from typing import Any

import pytest
import torch
from fixtures.round_steps import DRAFTS, OPTIONS, ROUNDS, assert_same_rounds, started
from torch import Tensor

from eyas import kernels
from eyas.config import TreeShape
from eyas.speculative.state import SlotSettings, SlotState
from eyas.speculative.torch_steps import TorchSteps
from eyas.types import SamplingParams

pytestmark = pytest.mark.interpreter


def triton_steps(state: SlotState) -> Any:
    """What a GPU's worker has from the start."""
    from eyas.speculative.triton_steps import TritonSteps

    return TritonSteps(state)


@pytest.mark.parametrize(
    ("name", "draft"),
    [*((name, "lucky") for name in ROUNDS), ("chain", "random"), ("tree", "random")],
)
def test_whole_rounds(name: str, draft: str) -> None:
    """The same tokens, state, keys and values, with padding in the batch."""
    assert_same_rounds(triton_steps, name, draft, num_rounds=2)


def test_a_packed_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes what the assignments write, and one slot only."""
    shape = TreeShape(1, 3, 4)
    ours = started(DRAFTS["random"], shape, TorchSteps).state
    ours.stop_ids_SM = ours.stop_ids_SM[:, :8]  # rows need not follow one another
    theirs = copy.deepcopy(ours)
    everything = SamplingParams(
        temperature=0.3,
        top_k=7,
        top_p=0.35,
        min_p=0.15,
        min_tokens=4,
        presence_penalty=-1.5,
        frequency_penalty=0.7,
        repetition_penalty=1.1,
        logit_bias={3: -2.5, 8: 7.0},
        speculation=False,
    )
    for slot, params in ((2, everything), (0, SamplingParams(temperature=0)), (2, OPTIONS)):
        request = SlotSettings(params, 9, -(2**63), [5, 2**40], [1, 2, 3], [4])
        theirs.admit(slot, request)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "has_triton", lambda device: True)
            ours.admit(slot, request)
        for name, value in vars(theirs).items():
            if isinstance(value, Tensor):
                assert torch.equal(getattr(ours, name), value), name
