"""Drafts with latent attention, from files to logits, against a row-by-row one that expands the
latent into keys and values of every head, as the absorbed form does not."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import (
    DraftShape,
    draft_config,
    draft_tensors,
    stored_tensors,
    write_config,
    write_target,
    write_weights,
)
from fixtures.slow_draft import Entry, SlowDraft
from fixtures.tiny import fresh_backend, random_prompts
from torch import Tensor

from eyas.cache.pool import NUM_RESERVED_PAGES
from eyas.models.boundaries import translate_layer_ids
from eyas.models.checkpoint import Checkpoint
from eyas.models.config import DraftConfig, LatentConfig, RopeConfig
from eyas.models.draft_config import canonical_name, inspect_draft, read_draft_config
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.loader import load_weights
from eyas.models.registry import target_class
from eyas.models.target_config import read_target_config

HEADS, NUM_PAIRS, NUM_STEPS = 4, 9, 4
SIZES = {"q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8}
SIZES |= {"v_head_dim": 12}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MSCALE = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}


def latent_tensors(shape: DraftShape, seed: int = 7) -> dict[str, Tensor]:
    """A draft's tensors with latent attention in place of q, k and v, by canonical name."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) * 0.2

    q, kv, nope, rope, v = SIZES.values()
    attention, width = "layers.0.self_attn", 2 * shape.hidden_size
    tensors = {k: t for k, t in draft_tensors(shape).items() if ".self_attn." not in k}
    own = {
        "q_a_proj": random(q, width),
        "q_a_layernorm": 1 + random(q),
        "q_b_proj": random(HEADS * (nope + rope), q),
        "kv_a_proj_with_mqa": random(kv + rope, width),
        "kv_a_layernorm": 1 + random(kv),
        "kv_b_proj": random(HEADS * (nope + v), kv),
        "o_proj": random(shape.hidden_size, HEADS * v),
    }
    return tensors | {f"{attention}.{name}.weight": tensor for name, tensor in own.items()}


def write_latent_draft(
    folder: Path, shape: DraftShape, config: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """The files of a draft, its config.json copied from a target with experts in part."""
    tensors = latent_tensors(shape)
    noise = {"model_type": "kimi_k2", "n_routed_experts": 384, "first_k_dense_replace": 1}
    data = draft_config(shape) | SIZES | noise
    data |= {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "head_dim": ...}
    write_config(folder, data, config)
    write_weights(folder, stored_tensors(shape, tensors))
    return tensors


class SlowLatentDraft(SlowDraft):
    """Keys and values of every head, made from the latent; rotation of neighbouring pairs."""

    def __init__(self, config: DraftConfig, weights: Mapping[str, Tensor]) -> None:
        latent = config.decoder.latent
        assert latent is not None
        decoder = dataclasses.replace(
            config.decoder, num_kv_heads=HEADS, head_dim=latent.qk_head_dim
        )
        super().__init__(dataclasses.replace(config, decoder=decoder), weights)
        self.latent = latent

    def weight(self, name: str) -> Tensor:
        return self.weights[f"layers.0.self_attn.{name}.weight"]

    def rotate(self, head: Tensor, position: int) -> Tensor:
        out, first = head.clone(), self.latent.nope_head_dim
        for i in range(self.latent.rope_head_dim // 2):
            angle = position * self.config.decoder.rope.theta ** (-2 * i / 8)
            turn = torch.polar(torch.ones(()), torch.tensor(angle)).to(torch.complex128)
            pair = torch.complex(head[first + 2 * i], head[first + 2 * i + 1]) * turn
            out[first + 2 * i], out[first + 2 * i + 1] = pair.real, pair.imag
        return out

    def _heads(self, name: str, read: Tensor) -> Tensor:
        assert name == "q"
        inner = self.norm(self.weight("q_a_proj") @ read, "layers.0.self_attn.q_a_layernorm.weight")
        return (self.weight("q_b_proj") @ inner).view(HEADS, -1)

    def entry(self, token: int, hidden: Tensor, position: int) -> Entry:
        read, _ = self._inputs(token, hidden)
        latent, rope = (self.weight("kv_a_proj_with_mqa") @ read).split(
            [self.latent.kv_lora_rank, self.latent.rope_head_dim]
        )
        latent = self.norm(latent, "layers.0.self_attn.kv_a_layernorm.weight")
        heads = (self.weight("kv_b_proj") @ latent).view(HEADS, -1)
        nope, value = heads.split([self.latent.nope_head_dim, self.latent.v_head_dim], dim=1)
        keys = torch.cat((nope, rope.expand(HEADS, -1)), dim=1)
        return Entry(torch.stack([self.rotate(key, position) for key in keys]), value)


@torch.inference_mode()
def fast(draft: Eagle3Draft, tokens: list[int], features_TF: Tensor) -> Tensor:
    """Logits of base pairs, then of recurrent steps."""
    backend = fresh_backend(draft.kv_layout, num_pages=1, page_size=len(tokens))
    table_1P = torch.full((1, 1), NUM_RESERVED_PAGES)
    logits, start, hidden_TH = [], 0, draft.combine(features_TF)
    while start < len(tokens):
        end = start + len(hidden_TH)
        plan = backend.plan_prefill(
            page_table_BP=table_1P, chunks=[(start, end)], device=torch.device("cpu")
        )
        rows_T = torch.arange(start, end)
        out = draft.forward(torch.tensor(tokens)[rows_T], hidden_TH, rows_T, rows_T * 0, plan)
        logits.append(out.logits_TV)
        start, hidden_TH = end, out.hidden_TH[-1:]
    return torch.cat(logits)


def slow(draft: SlowDraft, tokens: list[int], features_TF: Tensor) -> Tensor:
    past, logits, hidden = [], [], draft.combine(features_TF[0])
    for position, token in enumerate(tokens):
        if position < len(features_TF):
            hidden = draft.combine(features_TF[position])
        out = draft.step(token, hidden, position, past=past)
        past.append(out.entry)
        logits.append(out.logits)
        hidden = out.hidden
    return torch.stack(logits).float()


# (shape, keys of config.json beside it)
CASES: dict[str, tuple[DraftShape, dict[str, Any]]] = {
    "safeailab names": (DraftShape(), {}),
    "specforge": (DraftShape(format="specforge", layer_ids=(1, 3, 4), rope_theta=5e4), {}),
    "modelopt names": (DraftShape(prefix="model.layers.0."), {}),
    "3.1": (DraftShape(fc_norm=True, norm_output=True), {}),
    "norm_before_fc": (DraftShape(norm_before_fc=True), {}),
    "norm_before_residual": (DraftShape(norm_before_residual=True), {}),
    "whole vocabulary": (DraftShape(draft_vocab_size=256, has_map=False), {}),
    "sizes left to the tensors": (DraftShape(), dict.fromkeys(SIZES, ...)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_equals_a_row_by_row_one(tmp_path: Path, name: str) -> None:
    shape, said = CASES[name]
    target_weights = write_target(tmp_path / "target")
    weights = write_latent_draft(tmp_path / "draft", shape, said)
    target_config = read_target_config(tmp_path / "target")
    target: Any = target_class("LlamaForCausalLM")(target_config, dtype=torch.float32, device="cpu")
    load_weights(target, Checkpoint.open(tmp_path / "target"))
    config = read_draft_config(tmp_path / "draft", target_config)
    assert config.decoder.latent == LatentConfig(
        q_lora_rank=20, kv_lora_rank=24, nope_head_dim=10, rope_head_dim=8, v_head_dim=12
    )
    draft = Eagle3Draft(config, dtype=torch.float32, device="cpu")
    load_weights(draft, Checkpoint.open(tmp_path / "draft"), rename=canonical_name)
    draft.share_with_target(target)
    weights.setdefault("embed_tokens.weight", target_weights["model.embed_tokens.weight"])
    tokens = random_prompts([NUM_PAIRS + NUM_STEPS], vocab_size=256)[0]
    generator = torch.Generator().manual_seed(2)
    features_TF = torch.randn(NUM_PAIRS, config.num_features, generator=generator) * 2
    theirs_TV = slow(SlowLatentDraft(config, weights), tokens, features_TF)
    assert theirs_TV.std() > 0.05
    torch.testing.assert_close(fast(draft, tokens, features_TF), theirs_TV, atol=1e-4, rtol=0)


def test_a_scaled_rotation_scales_the_scores(tmp_path: Path) -> None:
    """DeepSeek's mscale: (0.1 ln 4 + 1)^2 on all scores when it is weighed for all dimensions."""
    target = write_and_read_target(tmp_path)
    scales = []
    for rope in (YARN, MSCALE):
        write_latent_draft(tmp_path / "draft", DraftShape(), {"rope_scaling": rope})
        config = read_draft_config(tmp_path / "draft", target)
        draft = Eagle3Draft(config, dtype=torch.float32, device="meta")
        scales.append(draft.layers[0].self_attn.scale)
    assert scales[0] == pytest.approx(18**-0.5)
    assert scales[1] == pytest.approx(18**-0.5 * 1.138629**2, rel=1e-5)


def test_a_plain_rotation_in_every_spelling(tmp_path: Path) -> None:
    """Newer files write one dictionary under two names; a plain one asks for no scaling."""
    target, same = write_and_read_target(tmp_path), {"rope_type": "default", "rope_theta": 3e4}
    spellings: list[dict[str, Any]] = [
        {"rope_theta": 3e4, "rope_scaling": None, "rope_parameters": None},
        {"rope_theta": ..., "rope_parameters": same},
        {"rope_theta": ..., "rope_scaling": same, "rope_parameters": same},
    ]
    for said in spellings:
        write_latent_draft(tmp_path / "draft", DraftShape(), said)
        config = read_draft_config(tmp_path / "draft", target)
        assert config.decoder.rope == RopeConfig(theta=3e4)
        draft = Eagle3Draft(config, dtype=torch.float32, device="meta")
        assert draft.layers[0].self_attn.scale == pytest.approx(18**-0.5)


def write_and_read_target(tmp_path: Path) -> Any:
    write_target(tmp_path / "target")
    return read_target_config(tmp_path / "target")


def test_without_weights_the_architecture_tells(tmp_path: Path) -> None:
    target = write_and_read_target(tmp_path)
    write_latent_draft(tmp_path / "draft", DraftShape())
    (tmp_path / "draft/model.safetensors").unlink()
    for alias in ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"):
        path = tmp_path / "draft/config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [alias]}))
        config = inspect_draft(tmp_path / "draft", target).config
        assert config is not None and config.decoder.latent is not None
        assert config.decoder.latent.cached_dim == 32


def test_sizes_that_the_tensors_contradict(tmp_path: Path) -> None:
    target = write_and_read_target(tmp_path)
    shape = DraftShape(layer_ids=(2, 4, 5))
    write_latent_draft(tmp_path / "draft", shape, {"v_head_dim": 128})
    reading = inspect_draft(tmp_path / "draft", target)
    assert [f.code for f in reading.findings] == ["config-contradicted"]
    assert "v_head_dim = 128, but the tensors show 12" in reading.findings[0].message


@pytest.mark.parametrize("format", ["specforge", "safeailab", "speculators"])
def test_both_conventions_of_kimis_layer_ids(format: Any) -> None:
    """[2, 30, 58] and [1, 29, 57] mean the same boundaries of 61 layers; the rule is told."""
    as_boundaries = translate_layer_ids([2, 30, 58], num_layers=61, format=format)
    as_outputs = translate_layer_ids([1, 29, 57], num_layers=61, format=format)
    assert as_boundaries.boundaries == as_outputs.boundaries == (2, 30, 58)
    assert not as_boundaries.is_guess and not as_outputs.is_guess
    assert as_boundaries.rule == "ids [2, 30, 58] are the default boundaries"
    assert as_outputs.rule.endswith("as layer outputs (+1)")
