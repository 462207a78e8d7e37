"""Blocks with plans compute what blocks without compute, in four kernels and attention."""

import dataclasses
from typing import Any

import pytest
import torch
from fixtures.tiny import draft_config, llama_config
from torch import Tensor, nn

from eyas import kernels
from eyas.comm.group import ALONE, Group
from eyas.kernels.linear_config import ROW_BUCKETS, LinearConfig, LinearPlan
from eyas.models.config import ModelConfig
from eyas.models.decoder import DecoderLayer
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.layers import GatedMLP, RMSNorm
from eyas.models.linear import Linear
from eyas.models.llama import LlamaForCausalLM
from eyas.models.residual import Stream, advance, linear_add, norm_linear

NEEDS_TRITON = pytest.mark.interpreter
DTYPE, CPU = torch.float16, "cpu"
CONFIG = LinearConfig("vector", 4, block_out=2, block_in=256, num_warps=1)


class OwnValues:
    """Attention in which every query head takes a value head of its row: nothing is cached."""

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        self.v_TKD = v_TKD

    def attend(self, layer: int, q_THD: Tensor, *, scale: float | None = None) -> Tensor:
        groups = q_THD.shape[1] // self.v_TKD.shape[1]
        return (q_THD + self.v_TKD.repeat_interleave(groups, 1)).flatten(1)


def fill(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            value = torch.randn(parameter.shape, generator=generator) * 0.25
            parameter.data.copy_(value + 1 if isinstance(module, RMSNorm) else value)


def with_plans(model: nn.Module) -> nn.Module:
    for linear in model.modules():
        if isinstance(linear, Linear):
            linear.plan = LinearPlan({(linear.form, rows): CONFIG for rows in ROW_BUCKETS[:3]})
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the weights that were run by a plan."""
    found: list[tuple[int, ...]] = []
    run = kernels.few_row_linear

    def counted(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append(tuple(weight.shape))
        return run(x, weight, *args, **kwargs)

    monkeypatch.setattr(kernels, "few_row_linear", counted)
    return found


def assert_close(actual: Tensor, expected: Tensor) -> None:
    size = expected.abs().max().item()
    limit = 8 * torch.finfo(DTYPE).eps
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit * size)


def hidden(num_rows: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_rows, size, generator=generator).to(DTYPE)


CONFIGS = {
    "llama": llama_config(),
    "biases": llama_config(qkv_bias=True, o_bias=True, mlp_bias=True),
    "head norms": llama_config(qk_norm=True),
}


@NEEDS_TRITON
@torch.inference_mode()
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_block(calls: list[tuple[int, ...]], name: str, num_rows: int) -> None:
    config = CONFIGS[name]
    block = DecoderLayer(config, 0, dtype=DTYPE, device=CPU)
    fill(block)
    x = hidden(num_rows, config.hidden_size)
    rotary = (torch.ones(num_rows, 1, 12, dtype=DTYPE), torch.zeros(num_rows, 1, 12, dtype=DTYPE))
    expected = block(x, rotary, OwnValues())
    assert calls == []
    stream = with_plans(block).advance(Stream(x), rotary, OwnValues())
    assert calls == [(96, 32), (32, 48), (96, 32), (32, 48)]
    assert stream.delta_TH is None
    assert_close(stream.hidden_TH, expected)
    assert_close(block(x, rotary, OwnValues()), expected)


@NEEDS_TRITON
@torch.inference_mode()
@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_a_draft(
    calls: list[tuple[int, ...]], norm_output: bool, norm_before_residual: bool
) -> None:
    target = LlamaForCausalLM(llama_config(), dtype=DTYPE, device=CPU)
    config = dataclasses.replace(
        draft_config(), norm_output=norm_output, norm_before_residual=norm_before_residual
    )
    draft = Eagle3Draft(config, dtype=DTYPE, device=CPU)
    fill(target)
    fill(draft)
    draft.d2t.zero_()
    draft.share_with_target(target)
    tokens = torch.tensor([3, 1])
    arguments = (tokens, hidden(2, 32), torch.tensor([5, 6]), tokens, OwnValues())
    expected = draft(*arguments)
    with_plans(draft)
    actual = draft(*arguments)
    assert len(calls) == 5  # qkv, o, gate and up, down, head
    assert_close(actual.logits_TV, expected.logits_TV)
    assert_close(actual.hidden_TH, expected.hidden_TH)


@NEEDS_TRITON
@torch.inference_mode()
def test_a_part_of_a_layers_outputs(calls: list[tuple[int, ...]]) -> None:
    linear = Linear(40, 24, bias=True, dtype=DTYPE, device=CPU)
    fill(linear)
    x = hidden(2, 40)
    expected = linear(x)[:, 10:]
    assert_close(linear.outputs_from(x, 10), expected)
    with_plans(linear)
    assert_close(linear.outputs_from(x, 10), expected)
    assert calls == [(14, 40)]


def gated() -> tuple[GatedMLP, RMSNorm, Tensor]:
    config: ModelConfig = llama_config()
    mlp = GatedMLP(config, dtype=DTYPE, device=CPU)
    norm = RMSNorm(32, 1e-5, dtype=DTYPE, device=CPU)
    fill(mlp)
    fill(norm)
    return mlp, norm, hidden(2, 32)


def test_plans_are_for_inference_and_few_rows(calls: list[tuple[int, ...]]) -> None:
    mlp, norm, x = gated()
    with_plans(mlp)
    mlp.advance(norm, Stream(x))  # gradients are recorded
    with torch.inference_mode():
        mlp.advance(norm, Stream(x.repeat(64, 1)))
    assert calls == []


@torch.inference_mode()
def test_a_sum_that_is_left_is_added_by_the_next_norm() -> None:
    mlp, norm, x = gated()
    stream = mlp.advance(norm, Stream(x))
    assert stream.hidden_TH is x and stream.delta_TH is not None
    assert torch.equal(stream.total(), x + mlp(norm(x)))
    total, normed = norm.enter(stream)
    assert torch.equal(total, stream.total())
    assert torch.equal(normed, norm(stream.total()))
    following = mlp.advance(norm, stream)
    assert torch.equal(following.total(), total + mlp(normed))
    hidden_TH, inner = norm_linear(norm, mlp.gate_up_proj, stream)
    assert torch.equal(hidden_TH, total)
    assert torch.equal(inner, mlp.gate_up_proj(normed))


@torch.inference_mode()
def test_a_part_without_its_own_way() -> None:
    _, norm, x = gated()
    stream = advance(nn.Identity(), norm, Stream(x))
    assert torch.equal(stream.total(), x + norm(x))


class TwoRanks(Group):
    """The other rank's part is the same as this one's."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x + x


@torch.inference_mode()
def test_ranks_add_up_before_the_residual(calls: list[tuple[int, ...]]) -> None:
    mlp, _, x = gated()
    with_plans(mlp)
    inner = hidden(2, 48)
    alone = nn.functional.linear(inner, mlp.down_proj.weight)
    stream = linear_add(mlp.down_proj, inner, x, group=TwoRanks())
    assert calls == []
    assert torch.equal(stream.total(), x + (alone + alone))
    mlp.down_proj.plan = None
    assert torch.equal(linear_add(mlp.down_proj, inner, x, group=ALONE).total(), x + alone)
