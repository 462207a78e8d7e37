"""Rounds on targets with latent attention and experts can be captured, whatever experts are chosen
and however their weights are stored."""

import dataclasses
from typing import Any

import pytest
import torch
from fixtures.capture_guard import on_meta, trace_of
from fixtures.mixtures import deepseek_config, fill, latent_config, latent_decoder, tiny_mixture
from fixtures.tiny import (
    draft_config,
    make_engine,
    random_prompts,
    tiny_draft,
    worker_shape,
)

from eyas.config import PLAIN, TreeShape
from eyas.engine.worker import Worker
from eyas.kernels import SamplingMode
from eyas.models.config import QuantConfig
from eyas.models.deepseek_v3 import DeepseekV3ForCausalLM
from eyas.types import SamplingParams

SHAPES = {"plain": PLAIN, "chain": TreeShape(3, 1, 4), "tree": TreeShape(3, 3, 10)}
MODE = SamplingMode(noise=True)
PARTS = frozenset({"attention", "mlp", "shared_experts", "experts"})


def quantized(scheme: Any) -> DeepseekV3ForCausalLM:
    """All linear layers of a tiny target in a quantized storage, of random numbers."""
    size = {"int4": 8, "fp8": 16}[scheme]
    quant = QuantConfig(scheme=scheme, group_size=size, parts=PARTS)
    latent = dataclasses.replace(latent_config(), q_lora_rank=16)  # a multiple of the group
    config = deepseek_config(quant=quant, latent=latent)
    model = DeepseekV3ForCausalLM(config, dtype=torch.float32, device="cpu")
    integers = [p for p in model.parameters() if p.dtype == torch.int32]
    for parameter in integers:
        parameter.random_(-(2**31), 2**31 - 1)
    fill_floats(model)
    return model


def fill_floats(model: torch.nn.Module) -> None:
    plain = torch.nn.Module()
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32:
            plain.register_parameter(name.replace(".", "_"), parameter)
        elif parameter.dtype == torch.float8_e4m3fn:
            parameter.copy_(torch.randn(parameter.shape) * 0.25)
    fill(plain, seed=3)


@pytest.fixture(scope="module", params=["deepseek", "kimi", "qwen", "int4", "fp8"])
def target(request: pytest.FixtureRequest) -> Any:
    name: str = request.param
    return quantized(name) if name in ("int4", "fp8") else tiny_mixture(name)


def prepared(target: Any, tree: TreeShape, *, seed: int) -> Worker:
    """A worker with three prompts in their slots (others of the same lengths for other seeds)."""
    draft = tiny_draft(target, draft_config(latent_decoder()))
    engine = make_engine(target, draft, worker_shape(tree, num_slots=4))
    params = SamplingParams(max_tokens=200, temperature=0.8, seed=seed)
    for number, prompt in enumerate(random_prompts([5, 17, 40], seed=seed)):
        engine.add(str(number), prompt, params)
    for _ in range(1 + seed % 2):
        engine.step()
    return engine.worker


@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_round_neither_waits_nor_changes_shape(target: Any, shape: str) -> None:
    """The same sequence of operators and shapes for other tokens, hence other experts."""
    tree = SHAPES[shape]
    first = trace_of(prepared(target, tree, seed=1), tree, MODE)
    second = trace_of(prepared(target, tree, seed=2), tree, MODE)
    assert len(first) > 100 and first == second


@pytest.mark.parametrize("shape", list(SHAPES))
@torch.inference_mode()
def test_the_round_runs_without_values(target: Any, shape: str) -> None:
    """On the meta device nothing can be read, so nothing is."""
    tree = SHAPES[shape]
    worker = on_meta(prepared(target, tree, seed=1))
    slots_B = torch.empty(4, dtype=torch.int64, device="meta")
    out = worker.runner.round(slots_B, tree, max_kv_len=128, mode=MODE)
    assert out.packed.is_meta and out.packed.shape == (4, tree.depth + 1 + 3)
