"""Shared blocks against transformers' Llama modules and plain loops."""

import math

import pytest
import torch
from fixtures.tiny import llama_config
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from eyas.config import MAX_TREE_NODES
from eyas.models.config import RopeConfig
from eyas.models.layers import GatedMLP, RMSNorm, RotaryEmbedding, SelfAttention

CPU = "cpu"


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def randomize(module: nn.Module) -> None:
    for seed, parameter in enumerate(module.parameters()):
        parameter.data.copy_(randn(*parameter.shape, seed=seed) * 0.3)


def rotary(rope: RopeConfig, *, head_dim: int = 8, max_model_len: int = 50) -> RotaryEmbedding:
    return RotaryEmbedding(
        rope,
        head_dim,
        max_position_embeddings=50,
        max_model_len=max_model_len,
        dtype=torch.float32,
        device=CPU,
    )


class Recorder:
    """Attention over the batch's own rows, causal; keeps what was written."""

    def __init__(self) -> None:
        self.written: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        self.written[layer] = (k_TKD, v_TKD)

    def attend(self, layer: int, q_THD: Tensor) -> Tensor:
        k_TKD, v_TKD = self.written[layer]
        groups = q_THD.shape[1] // k_TKD.shape[1]
        q, k, v = (
            x.transpose(0, 1)
            for x in (q_THD, k_TKD.repeat_interleave(groups, 1), v_TKD.repeat_interleave(groups, 1))
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(dtype: torch.dtype) -> None:
    ours, theirs = RMSNorm(16, 1e-6, dtype=dtype, device=CPU), LlamaRMSNorm(16, 1e-6).to(dtype)
    randomize(theirs)
    ours.weight.data.copy_(theirs.weight.data)
    x_TH = (randn(5, 16, seed=9) * 3).to(dtype)
    assert torch.equal(ours(x_TH), theirs(x_TH))


def test_mlp_equals_transformers() -> None:
    config = llama_config(mlp_bias=True)
    ours = GatedMLP(config, dtype=torch.float32, device=CPU)
    theirs = LlamaMLP(
        Qwen3Config(hidden_size=32, intermediate_size=48, hidden_act="silu", mlp_bias=True)
    )
    randomize(theirs)
    for part in ("weight", "bias"):
        gate, up = (getattr(getattr(theirs, f"{n}_proj"), part).data for n in ("gate", "up"))
        getattr(ours.gate_up_proj, part).data.copy_(torch.cat((gate, up)))
        getattr(ours.down_proj, part).data.copy_(getattr(theirs.down_proj, part).data)
    x_TH = randn(5, 32, seed=9)
    torch.testing.assert_close(ours(x_TH), theirs(x_TH), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_attention_with_head_norms_equals_transformers(bias: bool) -> None:
    """Qwen3: norms on q and k by head, before the rotation; transformers' own module."""
    config = llama_config(qk_norm=True, qkv_bias=bias, o_bias=bias, head_dim=8)
    ours = SelfAttention(config, 3, in_features=32, dtype=torch.float32, device=CPU)
    hf = Qwen3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=config.rms_norm_eps,
        attention_bias=bias,
        num_hidden_layers=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager",
    )
    theirs = Qwen3Attention(hf, 3)
    randomize(theirs)
    for part in ("weight", "bias")[: 1 + bias]:
        projections = [getattr(getattr(theirs, f"{n}_proj"), part).data for n in "qkv"]
        getattr(ours.qkv_proj, part).data.copy_(torch.cat(projections))
        getattr(ours.o_proj, part).data.copy_(getattr(theirs.o_proj, part).data)
    assert ours.q_norm is not None and ours.k_norm is not None
    ours.q_norm.weight.data.copy_(theirs.q_norm.weight.data)
    ours.k_norm.weight.data.copy_(theirs.k_norm.weight.data)
    x_TH, position_T = randn(6, 32, seed=9), torch.arange(6)
    cos_sin = Qwen3RotaryEmbedding(hf)(x_TH[None], position_T[None])
    mask = torch.full((1, 1, 6, 6), -math.inf).triu(1)
    expected, _ = theirs(x_TH[None], position_embeddings=cos_sin, attention_mask=mask)
    attention = Recorder()
    out = ours(x_TH, rotary(RopeConfig())(position_T), attention)
    torch.testing.assert_close(out, expected[0], atol=1e-5, rtol=1e-5)
    assert set(attention.written) == {3}


def test_the_rotary_table_reaches_a_tree_past_the_model_length() -> None:
    table = rotary(RopeConfig(), max_model_len=50)
    cos_T1D, sin_T1D = table(torch.tensor([0, 1, 50 + MAX_TREE_NODES - 1]))
    assert cos_T1D.shape == (3, 1, 8)
    rows = zip((0, 1, 113), cos_T1D[:, 0].tolist(), sin_T1D[:, 0].tolist(), strict=True)
    for position, cos, sin in rows:
        for i in range(8):
            angle = position * 10000.0 ** (-(2 * (i % 4)) / 8)
            signed = math.sin(angle) * (-1 if i < 4 else 1)
            assert (cos[i], sin[i]) == pytest.approx((math.cos(angle), signed), abs=1e-5)
    with pytest.raises(IndexError):
        table(torch.tensor([50 + MAX_TREE_NODES]))


def test_partial_rotary_turns_a_part_of_the_head() -> None:
    cos_T1D, _ = rotary(RopeConfig(partial=0.5))(torch.arange(3))
    assert cos_T1D.shape == (3, 1, 4)


def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="rope type 'longrope' is not implemented"):
        rotary(RopeConfig(kind="longrope"))
