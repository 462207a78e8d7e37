"""Parts of weights: together they are the whole, each rank reads its own, and no more."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import DraftShape, TargetShape, write_draft, write_target
from fixtures.mixtures import write_reference
from fixtures.quantized import EXPERT, INT4_TAG, LINEAR, fp8, fp8_tag, int4, quantize
from fixtures.tiny import llama_config
from torch import Tensor, nn

from eyas.comm.group import Group
from eyas.models.checkpoint import Checkpoint
from eyas.models.draft_config import read_draft_config
from eyas.models.draft_names import canonical_name
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.loader import load_weights
from eyas.models.registry import target_class
from eyas.models.sharding import Parallel, Shard, local_config, undivided
from eyas.models.target_config import read_target_config
from eyas.models.weight_slots import weight_slots

BIG: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 128, "intermediate_size": 128}
HEADS = {
    "v3": {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
    "qwen3-moe": {"head_dim": 16},
}


def parallel(rank: int, size: int, *, experts: bool = False) -> Parallel:
    return Parallel(Group(rank, size), experts)


def load(folder: Path, share: Parallel) -> nn.Module:
    config = read_target_config(folder)
    model: nn.Module = target_class(config.architecture)(
        config, dtype=torch.float32, device="cpu", parallel=share
    )
    for tensor in model.parameters():
        tensor.zero_()
    load_weights(model, Checkpoint.open(folder))
    return model


def parts(model: nn.Module) -> Iterator[tuple[str, Tensor, tuple[slice, ...] | None]]:
    """(stored name, what this rank holds, which part of the stored tensor that is)."""
    for name, slot in weight_slots(model).items():
        if slot.is_here and not slot.is_zero:
            yield name, slot.part_of(model.get_parameter(slot.path)), slot.source


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.parametrize("storage", ["plain", "int4", "fp8"])
@pytest.mark.parametrize("name", ["v3", "qwen3-moe"])
def test_the_parts_are_the_whole(
    tmp_path: Path, name: str, storage: str, by_number: bool, size: int
) -> None:
    write_reference(tmp_path, name, **(BIG | HEADS[name]))
    if storage == "int4":
        quantize(tmp_path, EXPERT, int4, INT4_TAG)
    elif storage == "fp8":
        quantize(tmp_path, LINEAR, lambda w: fp8(w, 16), fp8_tag(16))
    stored = Checkpoint.open(tmp_path)
    wholes = {n: stored.read(n) for n in stored.tensors}
    shares = [parallel(rank, size, experts=by_number) for rank in range(size)]
    assert undivided(read_target_config(tmp_path), shares[0]) == {}
    seen = {n: torch.zeros(t.shape, dtype=torch.int64) for n, t in wholes.items()}
    num_bytes = []
    for share in shares:
        model = load(tmp_path, share)
        num_bytes.append(sum(p.nbytes for p in model.parameters()))
        for stored_name, held, source in parts(model):
            whole = wholes[stored_name]
            wanted = whole if source is None else whole[source]
            assert torch.equal(held.to(torch.float32), wanted.to(torch.float32)), stored_name
            seen[stored_name][source if source is not None else ...] += 1
    seen = {n: count for n, count in seen.items() if not n.endswith("weight_shape")}
    assert all(count.min() >= 1 for count in seen.values())
    if by_number:  # experts are on one rank each
        assert all(count.max() == 1 for n, count in seen.items() if ".experts." in n)
    whole = load(tmp_path, parallel(0, 1))
    assert max(num_bytes) < sum(p.nbytes for p in whole.parameters()) / size * 1.4


def test_each_rank_reads_its_part_only(tmp_path: Path) -> None:
    write_reference(tmp_path, "qwen3-moe", **BIG)
    config = read_target_config(tmp_path)
    totals = []
    for rank in range(2):
        model = target_class(config.architecture)(
            config, dtype=torch.float32, device="cpu", parallel=parallel(rank, 2, experts=True)
        )
        totals.append(load_weights(model, Checkpoint.open(tmp_path)).loaded_bytes)
    stored = Checkpoint.open(tmp_path).num_bytes
    assert totals[0] == totals[1] and stored / 2 < totals[0] < stored * 0.6


def test_a_bias_of_divided_inputs_is_added_once(tmp_path: Path) -> None:
    write_reference(tmp_path, "v3-halves")
    biases = [
        load(tmp_path, parallel(rank, 2)).get_parameter("model.layers.0.self_attn.o_proj.bias")
        for rank in range(2)
    ]
    assert biases[0].abs().min() > 0 and biases[1].abs().max() == 0


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "kv"),
    [
        (8, 4, 2, [(0, 2), (2, 2)]),
        (8, 2, 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),  # a head on two ranks
        (8, 1, 2, [(0, 1), (0, 1)]),
        (9, 3, 2, [(0, 3), (0, 3)]),  # nothing divides: all of them on each
        (12, 6, 4, [(0, 6)] * 4),  # 3 heads of a rank would read parts of two groups
    ],
)
def test_key_value_heads(
    num_heads: int, num_kv_heads: int, size: int, kv: list[tuple[int, int]]
) -> None:
    config = llama_config(num_heads=num_heads, num_kv_heads=num_kv_heads)
    shares = [parallel(rank, size).attention(config) for rank in range(size)]
    assert [(share.kv.start, share.kv.size) for share in shares] == kv
    divides = shares[0].q.size < num_heads
    assert ("attention" in undivided(config, parallel(0, size))) is not divides
    for share in shares:  # each rank's queries read keys that it has
        groups = num_heads // num_kv_heads
        read = {head // groups for head in range(share.q.start, share.q.start + share.q.size)}
        assert read == set(range(share.kv.start, share.kv.start + share.kv.size))


def test_a_vocabulary_divides_by_any_number() -> None:
    for size in range(1, 9):
        shards = [parallel(rank, size).vocabulary(5) for rank in range(size)]
        rows = [row for s in shards for row in range(s.start, s.start + s.size)]
        assert rows == list(range(5))


def test_a_shard_of_packed_numbers() -> None:
    assert Shard(64, 64, 128).scaled(8) == (slice(8, 16), 16)
    assert Shard(128, 128, 300).scaled(1) == (slice(1, 2), 3)
    assert Shard(0, 100, 100).scaled(7) == (slice(0, 7), 7)


def test_the_shape_of_a_rank() -> None:
    config = llama_config()
    local = local_config(config, parallel(1, 2))
    changed = {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 24}
    assert local == dataclasses.replace(config, **changed)


@pytest.mark.parametrize("has_embedding", [False, True])
def test_a_draft_takes_the_rows_of_its_rank(tmp_path: Path, has_embedding: bool) -> None:
    write_target(tmp_path / "target", TargetShape(vocab_size=101))
    shape = DraftShape(vocab_size=101, draft_vocab_size=101, has_map=False, has_head=False)
    write_draft(tmp_path / "draft", dataclasses.replace(shape, has_embedding=has_embedding))
    config = read_draft_config(tmp_path / "draft", read_target_config(tmp_path / "target"))
    folder = tmp_path / ("draft" if has_embedding else "target")
    name = "embed_tokens.weight" if has_embedding else "model.embed_tokens.weight"
    stored = Checkpoint.open(folder).read(name)
    head = Checkpoint.open(tmp_path / "target").read("lm_head.weight")
    for rank, rows in enumerate((slice(0, 51), slice(51, 101))):
        target: Any = load(tmp_path / "target", parallel(rank, 2))
        draft = Eagle3Draft(config, dtype=torch.float32, device="cpu", parallel=parallel(rank, 2))
        load_weights(draft, Checkpoint.open(tmp_path / "draft"), rename=canonical_name)
        draft.share_with_target(target)
        assert draft.embed_tokens is not None and draft.lm_head is not None
        assert torch.equal(draft.embed_tokens.weight, stored[rows])
        assert torch.equal(draft.lm_head.weight, head[rows])
