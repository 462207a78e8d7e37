"""Strict loading into real models and into small stand-ins."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import (
    DraftShape,
    TargetShape,
    stored_tensors,
    write_draft,
    write_target,
    write_weights,
)
from torch import nn

from eyas.models import loader
from eyas.models.checkpoint import Checkpoint
from eyas.models.draft_config import canonical_name, read_draft_config
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.loader import LoadProgress, group_names, load_weights, weight_slots
from eyas.models.registry import target_class
from eyas.models.target_config import read_target_config
from eyas.types import EyasError

ARCHITECTURES = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


class Merged(nn.Module):
    """Two checkpoint modules in one."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.parts = {"q_proj": 2, "k_proj": 1}
        self.weight = nn.Parameter(torch.zeros(3, 4, device=device), False)
        self.bias = nn.Parameter(torch.zeros(3, device=device), False)


class Tiny(nn.Module):
    """A merged module, a plain one, an integer map, and a buffer that is not saved."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"qkv": Merged(device)})
        self.embed_tokens = nn.Embedding(5, 4, device=device)
        self.register_buffer("d2t", torch.zeros(300, dtype=torch.int64, device=device))
        self.register_buffer("cache", torch.zeros(1), persistent=False)


def tiny_tensors() -> dict[str, torch.Tensor]:
    return {
        "attn.q_proj.weight": torch.arange(8.0).reshape(2, 4),
        "attn.k_proj.weight": torch.arange(4.0).reshape(1, 4) + 100,
        "attn.q_proj.bias": torch.tensor([1.0, 2.0]),
        "attn.k_proj.bias": torch.tensor([3.0]),
        "embed_tokens.weight": torch.arange(20.0).reshape(5, 4),
        "d2t": torch.arange(300),
    }


def load(model: nn.Module, folder: Path, tensors: dict[str, torch.Tensor], **kwargs: Any) -> Any:
    write_weights(folder, tensors)
    return load_weights(model, Checkpoint.open(folder), **kwargs)


def test_slots_name_what_the_checkpoint_stores() -> None:
    slots = weight_slots(Tiny())
    assert set(slots) == set(tiny_tensors())
    key = slots["attn.k_proj.weight"]
    assert (key.path, key.start, key.shape) == ("attn.qkv.weight", 2, (1, 4))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parts_land_in_their_rows(tmp_path: Path, device: str) -> None:
    model, tensors = Tiny(device), tiny_tensors()
    load(model, tmp_path, tensors)
    merged = model.attn["qkv"]
    assert torch.equal(
        merged.weight, torch.cat([tensors["attn.q_proj.weight"], tensors["attn.k_proj.weight"]])
    )
    assert merged.bias.tolist() == [1, 2, 3]
    assert torch.equal(model.embed_tokens.weight, tensors["embed_tokens.weight"])


def test_integer_maps_are_never_cast(tmp_path: Path) -> None:
    model = Tiny().to(torch.bfloat16)
    tensors = tiny_tensors()
    tensors["d2t"] = tensors["d2t"].to(torch.int32)
    load(model, tmp_path, tensors)
    # bfloat16 is exact only up to 256.
    assert model.d2t.dtype == torch.int64 and model.d2t.tolist() == list(range(300))
    assert model.embed_tokens.weight.dtype == torch.bfloat16


def test_everything_wrong_comes_at_once_and_nothing_is_read(tmp_path: Path) -> None:
    model, tensors = Tiny(), tiny_tensors()
    del tensors["attn.q_proj.bias"]
    tensors["gate.weight"] = torch.zeros(1)
    tensors["embed_tokens.weight"] = torch.zeros(6, 4)
    tensors["attn.k_proj.weight"] = torch.zeros(1, 4, dtype=torch.int8)
    tensors["d2t"] = torch.zeros(300)
    with pytest.raises(EyasError) as raised:
        load(model, tmp_path, tensors)
    text = str(raised.value)
    for words in (
        "1 missing: attn.q_proj.bias",
        "1 left over: gate.weight",
        "embed_tokens.weight is [6, 4], expected [5, 4]",
        "attn.k_proj.weight is int8, expected floats",
        "d2t is float32, expected integers",
    ):
        assert words in text
    assert not model.attn["qkv"].weight.any()


def test_two_names_for_one_slot(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"x.embed_tokens.weight": torch.zeros(5, 4)}
    with pytest.raises(EyasError, match=r"1 stored twice: x\.embed_tokens\.weight"):
        load(Tiny(), tmp_path, tensors, rename=lambda name: name.removeprefix("x."))


def test_names_without_a_place_are_left_over(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"other": torch.zeros(1)}
    with pytest.raises(EyasError, match="1 left over: other"):
        load(Tiny(), tmp_path, tensors, rename=lambda name: None if name == "other" else name)
    load(Tiny(), tmp_path, tensors, ignore=("other",))


def test_harmless_constants_are_ignored(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "attn.masked_bias": torch.zeros(1),
    }
    load(Tiny(), tmp_path, tensors)


def test_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[LoadProgress] = []
    monkeypatch.setattr(loader, "TELL_EVERY", 0.0)
    total = load(Tiny(), tmp_path, tiny_tensors(), progress=seen.append)
    assert [p.loaded_bytes for p in seen] == sorted(p.loaded_bytes for p in seen)
    assert len(seen) == 6 and seen[-1] == total
    assert total.loaded_bytes == total.total_bytes == sum(t.nbytes for t in tiny_tensors().values())
    assert total.bytes_per_second > 0 and total.seconds_left == 0
    monkeypatch.setattr(loader, "TELL_EVERY", 1000.0)
    seen.clear()
    load(Tiny(), tmp_path, tiny_tensors(), progress=seen.append)
    assert [p.loaded_bytes for p in seen] == [total.total_bytes]


def test_grouped_names() -> None:
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(3)] + ["norm.weight"]
    assert group_names(names) == (
        "model.layers.*.mlp.up_proj.weight (×3, first model.layers.0.mlp.up_proj.weight), "
        "norm.weight"
    )
    assert group_names([f"t{i}" for i in range(10)], most=2) == "t0, t1 and 8 more"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_targets(tmp_path: Path, architecture: str, tied: bool, device: str) -> None:
    shape = TargetShape(architecture=architecture, tied=tied)
    tensors = write_target(tmp_path, shape, num_shards=3)
    config = read_target_config(tmp_path)
    model: Any = target_class(architecture)(
        config, dtype=torch.float32, device=device, max_model_len=4
    )
    load_weights(model, Checkpoint.open(tmp_path))
    slots = weight_slots(model)
    assert set(slots) == set(tensors)
    for name, slot in slots.items():
        whole = model.get_parameter(slot.path)
        assert torch.equal(whole[slot.start : slot.start + slot.shape[0]], tensors[name])
    embed, head = model.get_embed_and_head()
    assert (embed.data_ptr() == head.data_ptr()) == tied
    assert not any(parameter.is_meta for parameter in model.parameters())


def write_tied(folder: Path, head: torch.Tensor | None) -> Any:
    tensors = write_target(folder, TargetShape(tied=True))
    if head is None:
        head = tensors["model.embed_tokens.weight"]
    write_weights(folder, tensors | {"lm_head.weight": head})
    return target_class("LlamaForCausalLM")(
        read_target_config(folder), dtype=torch.float32, device="cpu", max_model_len=4
    )


def test_a_stored_copy_of_a_tied_head(tmp_path: Path) -> None:
    load_weights(write_tied(tmp_path, None), Checkpoint.open(tmp_path))


def test_a_tied_head_that_differs(tmp_path: Path) -> None:
    model = write_tied(tmp_path, torch.zeros(256, 64))
    with pytest.raises(EyasError, match="set tie_word_embeddings false"):
        load_weights(model, Checkpoint.open(tmp_path))


def test_a_tied_head_of_another_shape_is_left_over(tmp_path: Path) -> None:
    model = write_tied(tmp_path, torch.zeros(97, 64))
    with pytest.raises(EyasError, match=r"left over: lm_head\.weight"):
        load_weights(model, Checkpoint.open(tmp_path))


class SelfOnly:
    """Attention in which each row sees itself alone."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.v_TKD = v

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        return self.v_TKD.repeat_interleave(q.shape[1] // self.v_TKD.shape[1], dim=1).flatten(1)


def draft_logits(folder: Path, target_folder: Path) -> torch.Tensor:
    target_config = read_target_config(target_folder)
    target: Any = target_class(target_config.architecture)(
        target_config, dtype=torch.float32, device="cpu", max_model_len=4
    )
    load_weights(target, Checkpoint.open(target_folder))
    config = read_draft_config(folder, target_config)
    draft = Eagle3Draft(config, dtype=torch.float32, device="cpu", max_model_len=4)
    load_weights(draft, Checkpoint.open(folder), rename=canonical_name)
    draft.share_with_target(target)
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(4, config.num_features, generator=generator)
    ids = torch.arange(4)
    output = draft.forward(ids, draft.combine(features), ids, ids, SelfOnly())
    return output.logits_TV


@pytest.mark.parametrize(
    "flags", [{}, {"norm_before_residual": True, "norm_before_fc": True}, {"fc_norm": True}]
)
def test_every_format_gives_the_same_logits(tmp_path: Path, flags: dict[str, bool]) -> None:
    write_target(tmp_path / "target")
    shapes = [
        DraftShape(format="safeailab"),
        DraftShape(format="safeailab", prefix="layers.0."),
        DraftShape(format="safeailab", prefix="model.layers.0."),
        DraftShape(format="specforge", layer_ids=(1, 3, 4)),
        DraftShape(format="speculators", layer_ids=(2, 4, 5)),
    ]
    results = []
    for i, shape in enumerate(shapes):
        folder = tmp_path / str(i)
        write_draft(
            folder,
            dataclasses.replace(shape, **flags),
            kind="bin" if i == 1 else "safetensors",
            config={"num_hidden_layers": 40} if i == 2 else None,
        )
        results.append(draft_logits(folder, tmp_path / "target"))
    assert results[0].shape == (4, 97) and results[0].std() > 1e-3
    for logits in results[1:]:
        assert torch.equal(logits, results[0])


def test_a_draft_with_a_tensor_too_many_or_too_few(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    config = read_target_config(tmp_path / "target")
    shape = DraftShape()
    tensors = write_draft(tmp_path / "draft", shape)
    draft_config = read_draft_config(tmp_path / "draft", config)
    stored = stored_tensors(shape, tensors)
    stored["midlayer.self_attn.q_norm.weight"] = torch.ones(24)
    del stored["midlayer.hidden_norm.weight"]
    draft = Eagle3Draft(draft_config, dtype=torch.float32, device="cpu", max_model_len=4)
    with pytest.raises(EyasError) as raised:
        load(draft, tmp_path / "draft", stored, rename=canonical_name)
    assert "1 missing: layers.0.hidden_norm.weight" in str(raised.value)
    assert "1 left over: midlayer.self_attn.q_norm.weight" in str(raised.value)
