"""Weight files: headers without weights, both kinds, shards, and every way of being broken."""

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import write_weights

from eyas.models.checkpoint import Checkpoint, CheckpointError, NoWeightsError

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.ones(4, dtype=torch.bfloat16),
    "c": torch.tensor([1, -2, 3]),
    "d": torch.tensor([True, False]),
    "e": torch.tensor(1.5),
}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_lists_and_reads_what_was_written(tmp_path: Path, kind: Any, num_shards: int) -> None:
    write_weights(tmp_path, TENSORS, kind=kind, num_shards=num_shards)
    checkpoint = Checkpoint.open(tmp_path)
    assert len(checkpoint.files) == num_shards
    assert set(checkpoint.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        info = checkpoint.tensors[name]
        assert info.shape == tuple(tensor.shape)
        assert info.dtype == str(tensor.dtype).removeprefix("torch.")
        assert info.num_bytes == tensor.nbytes
        assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.read(name).dtype == tensor.dtype
    streamed = dict(checkpoint.stream())
    assert all(torch.equal(streamed[name], tensor) for name, tensor in TENSORS.items())
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in TENSORS.values())


def test_byte_ranges_are_the_tensors(tmp_path: Path) -> None:
    (path,) = write_weights(tmp_path, TENSORS)
    info = Checkpoint.open(tmp_path).tensors["a"]
    assert info.offset is not None
    raw = path.read_bytes()[info.offset : info.offset + info.num_bytes]
    assert raw == TENSORS["a"].numpy().tobytes()


def test_stream_takes_file_after_file(tmp_path: Path) -> None:
    write_weights(tmp_path, TENSORS, num_shards=2)
    checkpoint = Checkpoint.open(tmp_path)
    files = [checkpoint.tensors[name].file.name for name, _ in checkpoint.stream()]
    assert files == sorted(files)


def test_a_damaged_weight_does_not_matter_to_the_header(tmp_path: Path) -> None:
    (path,) = write_weights(tmp_path, {"a": torch.ones(1000)})
    raw = bytearray(path.read_bytes())
    raw[-4000:] = b"\xff" * 4000
    path.write_bytes(raw)
    assert Checkpoint.open(tmp_path).tensors["a"].shape == (1000,)


def test_safetensors_win_over_bin(tmp_path: Path) -> None:
    write_weights(tmp_path, {"old": torch.ones(1)}, kind="bin")
    write_weights(tmp_path, {"new": torch.ones(1)})
    assert list(Checkpoint.open(tmp_path).tensors) == ["new"]


@pytest.mark.parametrize(
    "name", ["training_state.pt", "optimizer.bin", "training_args.bin", "scheduler.bin"]
)
def test_training_files_are_never_opened(tmp_path: Path, name: str) -> None:
    write_weights(tmp_path, {"a": torch.ones(1)}, kind="bin")
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "draft.bin")
    (tmp_path / name).write_bytes(b"not to be read")
    assert list(Checkpoint.open(tmp_path).tensors) == ["a"]


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_bin_runs_no_code(tmp_path: Path, is_zip: bool) -> None:
    path, touched = tmp_path / "pytorch_model.bin", tmp_path / "touched"
    contents = {"a": torch.ones(1), "b": Bomb(touched)}
    if is_zip:
        torch.save(contents, path)
    else:
        path.write_bytes(pickle.dumps(contents))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read"):
        Checkpoint.open(tmp_path)
    assert not touched.exists()


def test_a_bin_from_before_zip_archives(tmp_path: Path) -> None:
    torch.save(
        {"a": TENSORS["a"]}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    assert torch.equal(Checkpoint.open(tmp_path).read("a"), TENSORS["a"])


def test_a_bin_with_other_entries(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="epoch"):
        Checkpoint.open(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NoWeightsError):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        Checkpoint.open(tmp_path / "nowhere")


def test_an_index_without_any_shard_is_no_weights(tmp_path: Path) -> None:
    for path in write_weights(tmp_path, TENSORS, num_shards=2):
        path.unlink()
    with pytest.raises(NoWeightsError, match="none of them"):
        Checkpoint.open(tmp_path)


def header(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    found: dict[str, Any] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return found


def rewrite(path: Path, entries: dict[str, Any] | str, *, keep_data: bool = True) -> None:
    raw = path.read_bytes()
    data = raw[8 + int.from_bytes(raw[:8], "little") :]
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + (data if keep_data else b""))


def change_entry(path: Path, name: str, **changes: Any) -> None:
    entries = header(path)
    entries[name] |= changes
    rewrite(path, entries)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0" * 8)


def overlap(path: Path) -> None:
    entries = {k: v for k, v in header(path).items() if k in ("a", "e")}
    entries["a"]["data_offsets"] = [0, 24]
    entries["e"]["data_offsets"] = [20, 24]
    rewrite(path, entries)


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (lambda p: p.write_bytes(p.read_bytes()[:-1]), "truncated"),
    (lambda p: p.write_bytes(p.read_bytes()[:20]), "truncated within its header"),
    (lambda p: p.write_bytes(b""), "truncated"),
    (lambda p: p.write_bytes(b"\xff" * 64), "no safetensors file"),
    (lambda p: p.write_bytes(LFS), "git lfs pull"),
    (lambda p: rewrite(p, "{"), "broken header"),
    (lambda p: rewrite(p, "[]"), "broken header"),
    (lambda p: rewrite(p, '{"a": 1, "a": 2}'), "appears twice"),
    (lambda p: rewrite(p, {"a": {"dtype": "F32"}}), "not described"),
    (lambda p: change_entry(p, "a", shape=[2.5, 3]), "not described"),
    (lambda p: change_entry(p, "a", shape=[-2, 3]), "not described"),
    (lambda p: change_entry(p, "a", dtype="F31"), "unknown dtype"),
    (lambda p: change_entry(p, "a", shape=[2, 4]), "needs 32 bytes, its range has 24"),
    (lambda p: change_entry(p, "a", dtype="F64"), "needs 48 bytes"),
    (append, "8 bytes after its last tensor"),
    (overlap, "overlap"),
    (lambda p: rewrite(p, {k: v for k, v in header(p).items() if k != "a"}), "belong to no tensor"),
]


@pytest.mark.parametrize(("damage", "words"), BROKEN)
def test_broken_files_are_named(tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    (path,) = write_weights(tmp_path, TENSORS)
    damage(path)
    with pytest.raises(CheckpointError, match=words) as raised:
        Checkpoint.open(tmp_path)
    assert "model.safetensors" in str(raised.value)


def test_an_lfs_pointer_for_a_bin(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(LFS)
    with pytest.raises(CheckpointError, match="git lfs pull"):
        Checkpoint.open(tmp_path)


def test_all_broken_shards_come_together(tmp_path: Path) -> None:
    first, second = write_weights(tmp_path, TENSORS, num_shards=2)
    first.write_bytes(LFS)
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as raised:
        Checkpoint.open(tmp_path)
    assert first.name in str(raised.value) and second.name in str(raised.value)


def edit_index(folder: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda m: m.update(z=SHARDS[0]), f"{SHARDS[0]} lacks 1 tensor"),
        (lambda m: m.update(a=SHARDS[1]), f"places a in {SHARDS[1]}, but {SHARDS[0]} holds it"),
        (lambda m: m.pop("a"), f"{SHARDS[0]} holds tensors that the index does not list: a"),
        (lambda m: m.update(z="model-00003.safetensors"), r"missing: model-00003\.safetensors"),
        (lambda m: m.update(z="../other.safetensors"), "outside its folder"),
        (lambda m: m.clear(), "no weight_map"),
    ],
)
def test_an_index_that_disagrees(
    tmp_path: Path, edit: Callable[[dict[str, str]], Any], words: str
) -> None:
    write_weights(tmp_path, TENSORS, num_shards=2)
    edit_index(tmp_path, edit)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_weights(tmp_path, TENSORS, num_shards=2)[1].unlink()
    with pytest.raises(CheckpointError, match=SHARDS[1]) as raised:
        Checkpoint.open(tmp_path)
    assert not isinstance(raised.value, NoWeightsError)


def test_shards_without_an_index(tmp_path: Path) -> None:
    paths = write_weights(tmp_path, TENSORS, num_shards=3)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert set(Checkpoint.open(tmp_path).tensors) == set(TENSORS)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match="has 3 shards; missing: 2"):
        Checkpoint.open(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    paths = write_weights(tmp_path, TENSORS, num_shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(CheckpointError, match="stored in two files"):
        Checkpoint.open(tmp_path)


def test_several_files_without_order(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_weights(tmp_path, TENSORS)
        (tmp_path / "model.safetensors").rename(tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="several weight files"):
        Checkpoint.open(tmp_path)
