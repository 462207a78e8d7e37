"""The plan's numbers for experts and latent attention against what the allocator hands out."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fixtures.mixtures import deepseek_config, experts_config, latent_config
from fixtures.tiny import fresh_backend, llama_config
from torch.profiler import ProfilerActivity, profile

from eyas.cache.pool import NUM_RESERVED_PAGES
from eyas.config import PLAIN
from eyas.engine.memory_activations import Activations
from eyas.models.config import ExpertsConfig, ModelConfig, QuantConfig
from eyas.models.deepseek_v3 import DeepseekV3ForCausalLM
from eyas.models.moe import Experts
from eyas.models.qwen3_moe import Qwen3MoeForCausalLM


def allocated_peak(function: Callable[[], object]) -> int:
    """Bytes that the allocator had handed out at the worst moment of a call, above its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def activations(config: ModelConfig, chunk: int, dtype: torch.dtype) -> Activations:
    return Activations(
        target=config,
        draft=None,
        tree=PLAIN,
        page_size=16,
        prefill_chunk_tokens=chunk,
        dtype_bytes=dtype.itemsize,
    )


# (rows, experts, chosen, hidden, size of an expert)
SIZES = [(512, 8, 4, 128, 64), (512, 8, 2, 64, 256), (6, 64, 3, 128, 128), (512, 32, 4, 256, 64)]


@pytest.mark.parametrize("scheme", ["plain", "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
@torch.inference_mode()
def test_experts(size: tuple[int, ...], dtype: torch.dtype, scheme: str) -> None:
    num_rows, num_experts, chosen, hidden, inner = size
    experts = dataclasses.replace(
        experts_config(),
        num_experts=num_experts,
        num_experts_per_token=chosen,
        intermediate_size=inner,
    )
    config = deepseek_config(hidden_size=hidden, experts=experts)
    if scheme != "plain":
        quant = QuantConfig(scheme=scheme, group_size=32, parts=frozenset({"experts"}))  # type: ignore[arg-type]
        config = dataclasses.replace(config, quant=quant)
    model = Experts(config, dtype=dtype, device="cpu")
    for parameter in model.parameters():
        parameter.zero_()
    x_TH = torch.ones(num_rows, hidden, dtype=dtype)
    expert_TK = torch.rand(num_rows, num_experts).topk(chosen).indices
    weight_TK = torch.ones(num_rows, chosen)
    model(x_TH, expert_TK, weight_TK)
    peak = allocated_peak(lambda: model(x_TH, expert_TK, weight_TK))
    planned = activations(config, num_rows, dtype)._mixture(config, experts, num_rows)
    planned -= 4 * num_rows * hidden * dtype.itemsize  # what surrounds the experts
    assert peak <= planned * 1.05
    assert planned <= peak * (1.05 if scheme == "plain" else 1.8)


def chunk_peak(model: Any, dtype: torch.dtype, num_rows: int) -> int:
    """What a prompt chunk of a model takes at its worst moment, its plan of attention included."""
    for parameter in model.parameters():
        parameter.zero_()
    backend = fresh_backend(model.kv_layout, num_pages=1, page_size=num_rows)
    backend.pool.layers = [(k.to(dtype), v.to(dtype)) for k, v in backend.pool.layers]
    backend.pool.k_LRKD = backend.pool.k_LRKD.to(dtype)
    table_1P = torch.full((1, 1), NUM_RESERVED_PAGES)
    tokens_T = torch.zeros(num_rows, dtype=torch.int64)

    def run() -> object:
        plan = backend.plan_prefill(
            page_table_BP=table_1P, chunks=[(0, num_rows)], device=torch.device("cpu")
        )
        return model.forward(tokens_T, torch.arange(num_rows), plan)

    run()
    return allocated_peak(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_chunk_with_latent_attention(dtype: torch.dtype) -> None:
    chunk = 512
    latent = dataclasses.replace(
        latent_config(), kv_lora_rank=64, rope_head_dim=32, nope_head_dim=32, v_head_dim=32
    )
    config = deepseek_config(
        num_heads=16, head_dim=32, latent=latent, max_position_embeddings=chunk
    )
    peak = chunk_peak(DeepseekV3ForCausalLM(config, dtype=dtype, device="cpu"), dtype, chunk)
    planned = activations(config, chunk, dtype).phases(1, chunk)["prompt chunk"]
    assert peak <= planned * 1.05 and planned <= peak * 1.1


@pytest.mark.parametrize(("num_experts", "chosen", "hidden"), [(32, 3, 128), (128, 8, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_chunk_of_qwen3_moe(
    dtype: torch.dtype, num_experts: int, chosen: int, hidden: int
) -> None:
    chunk = 512
    experts = ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_token=chosen,
        intermediate_size=64,
        layers=(0, 1, 2, 3),
    )
    config = llama_config(
        hidden_size=hidden, qk_norm=True, experts=experts, max_position_embeddings=chunk
    )
    peak = chunk_peak(Qwen3MoeForCausalLM(config, dtype=dtype, device="cpu"), dtype, chunk)
    planned = activations(config, chunk, dtype).phases(1, chunk)["prompt chunk"]
    assert peak <= planned * 1.03 and planned <= peak * 1.03
