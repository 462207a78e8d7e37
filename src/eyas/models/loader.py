"""Strict loading: every parameter filled exactly once, every stored tensor used exactly once.

`cover` compares names, shapes and dtypes from headers alone, so that the check can say before any
weight is read what `load_weights` would refuse.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from eyas.models.checkpoint import PLAIN_DTYPES, Checkpoint, TensorInfo
from eyas.models.direct_read import PIECE_BYTES, ReadJob, read_directly
from eyas.models.weight_slots import WeightSlot, materialize, stored_names, weight_slots
from eyas.types import EyasError

__all__ = ["Coverage", "LoadProgress", "WeightSlot", "cover", "load_weights", "weight_slots"]

TELL_EVERY = 0.05  # seconds
# Constants that checkpoints store beside their weights; t2d serves the training of drafts only.
HARMLESS_BUFFERS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|masked_bias|t2d)")
_INTEGERS = {"int64", "int32", "int16", "int8", "uint8"}
# What the shape of packed weights says already.
_PACKED, _PACKED_SHAPE = "weight_packed", "weight_shape"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"

Rename = Callable[[str], str | None]


@dataclasses.dataclass(frozen=True)
class LoadProgress:
    """How far loading is. Sizes in stored bytes, of what this rank reads."""

    name: str
    loaded_bytes: int
    total_bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Mean rate so far."""
        return self.loaded_bytes / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float:
        """Time for the rest at the mean rate."""
        return (self.total_bytes - self.loaded_bytes) / max(self.bytes_per_second, 1e-9)


@dataclasses.dataclass
class Coverage:
    """How a checkpoint's tensors meet a model's slots.

    sources: stored name -> slot name, for all that fit. missing: slots without a tensor.
    left_over: stored names without a slot. wrong_shape: (stored name, stored, expected).
    wrong_dtype: (stored name, stored, what is expected). twice: stored names for a slot that has
    one already. tied: (stored head, slot of the embedding), whose values must be equal. ignored:
    by prefix, how many stored tensors are known and not read.
    """

    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: list[str] = dataclasses.field(default_factory=list)
    left_over: list[str] = dataclasses.field(default_factory=list)
    wrong_shape: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = dataclasses.field(
        default_factory=list
    )
    wrong_dtype: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    twice: list[str] = dataclasses.field(default_factory=list)
    tied: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    ignored: dict[str, int] = dataclasses.field(default_factory=dict)

    def lines(self) -> dict[str, str]:
        """One line for each way in which the two do not fit, by kind; empty when they do."""
        lines = {}
        names = {"missing": self.missing, "left-over": self.left_over, "twice": self.twice}
        for kind, found in names.items():
            if found:
                verb = "stored " if kind == "twice" else ""
                lines[kind] = f"{len(found)} {verb}{kind.replace('-', ' ')}: {group_names(found)}"
        for kind, wrong in (("wrong-shape", self.wrong_shape), ("wrong-dtype", self.wrong_dtype)):
            shown = [f"{name} is {_show(a)}, expected {_show(b)}" for name, a, b in wrong[:8]]
            more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            if wrong:
                what = kind.partition("-")[2]
                lines[kind] = f"{len(wrong)} of a wrong {what}: {'; '.join(shown)}{more}"
        return lines


def group_names(names: Collection[str], most: int = 8) -> str:
    """Tensor names, those that differ in a number only as one: "layers.*.mlp.up_proj.weight (×30,
    first layers.0.mlp.up_proj.weight)"."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    shown = [
        members[0] if len(members) == 1 else f"{pattern} (×{len(members)}, first {members[0]})"
        for pattern, members in groups.items()
    ]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def cover(
    slots: Mapping[str, WeightSlot],
    tensors: Mapping[str, TensorInfo],
    *,
    rename: Rename | None = None,
    ignore: Collection[str] = (),
) -> Coverage:
    """Match stored tensors with slots, by headers alone.

    rename: stored name -> slot name, None for what has no place (left over). ignore: names or
    prefixes that end in a dot, after renaming, that may be stored and are not read; constants
    (`rotary_emb.inv_freq`, a draft's t2d) always may.
    """
    prefixes = tuple(name for name in ignore if name.endswith("."))
    coverage = Coverage()
    filled: set[str] = set()
    for stored, info in tensors.items():
        name = rename(stored) if rename else stored
        if (name or stored) in ignore or HARMLESS_BUFFERS.fullmatch(stored):
            continue
        if (name or stored).startswith(prefixes):
            prefix = next(p for p in prefixes if (name or stored).startswith(p))
            coverage.ignored[prefix] = coverage.ignored.get(prefix, 0) + 1
            continue
        if name is not None and _is_packed_shape(name, slots):
            continue
        slot = slots.get(name) if name else None
        if name is None or slot is None:
            embedding = _tied_embedding(name, info, slots)
            if embedding is None:
                coverage.left_over.append(stored)
            else:
                coverage.tied.append((stored, embedding))
            continue
        if name in filled:
            coverage.twice.append(stored)
            continue
        filled.add(name)
        allowed, expected = _allowed_dtypes(slot.dtype)
        if info.shape != slot.shape:
            coverage.wrong_shape.append((stored, info.shape, slot.shape))
        elif info.dtype not in allowed:
            coverage.wrong_dtype.append((stored, info.dtype, expected))
        else:
            coverage.sources[stored] = name
    coverage.missing = [name for name in slots if name not in filled]
    return coverage


def _is_packed_shape(name: str, slots: Mapping[str, WeightSlot]) -> bool:
    base, dot, last = name.rpartition(".")
    return last == _PACKED_SHAPE and f"{base}{dot}{_PACKED}" in slots


def _allowed_dtypes(dtype: torch.dtype) -> tuple[Collection[str], str]:
    """(stored dtypes that may fill a slot, what to call them). Quantized ones are read as is."""
    if dtype in (torch.int32, torch.float8_e4m3fn):
        name = str(dtype).removeprefix("torch.")
        return {name}, name
    return (PLAIN_DTYPES, "floats") if dtype.is_floating_point else (_INTEGERS, "integers")


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    rename: Rename | None = None,
    ignore: Collection[str] = (),
    device: torch.device | str = "cpu",
    progress: Callable[[LoadProgress], None] | None = None,
) -> LoadProgress:
    """Fill all parameters and saved buffers of `model` from `checkpoint`; returns the totals.

    rename, ignore: see `cover`; without them the model's own `stored_names` hold. Floats are
    converted to the parameter's dtype (quantized ones stay as they are), integer maps (d2t) to the
    buffer's int64 and never to a float. Tensors go straight into the parameters, wherever
    those live; parameters on the meta device are made on `device` when their turn comes.
    progress: called every TELL_EVERY seconds and at the end.

    Raises EyasError, before anything is read, that lists all that is missing, left over, of a
    wrong shape or of a wrong dtype; and when a stored head differs from a tied embedding.
    """
    slots, names = weight_slots(model), stored_names(model)
    rename, ignore = rename or names.rename, ignore or names.ignored
    coverage = cover(slots, checkpoint.tensors, rename=rename, ignore=ignore)
    problems = coverage.lines()
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems.values())
        raise EyasError(f"{checkpoint.folder} does not fit {type(model).__name__}:\n{lines}")
    _require_equal_heads(checkpoint, coverage)
    num_bytes = {
        stored: _local_bytes(slots[name], checkpoint.tensors[stored])
        for stored, name in coverage.sources.items()
        if slots[name].is_here
    }
    tally = _Tally(sum(num_bytes.values()), progress)
    jobs: dict[torch.device, list[ReadJob]] = {}
    others: set[str] = set()
    for stored in num_bytes:
        slot = slots[coverage.sources[stored]]
        whole = materialize(model, slot.path, device)
        job = _direct_job(slot, whole, checkpoint.tensors[stored])
        if job is None:
            others.add(stored)
        else:
            jobs.setdefault(whole.device, []).append(job)
    for on_device in jobs.values():
        read_directly(on_device, on_read=tally.add)
    if others:
        for stored, tensor in checkpoint.stream():
            if stored in others:
                slot = slots[coverage.sources[stored]]
                _fill(materialize(model, slot.path, device), slot, tensor)
                tally.add(stored, num_bytes[stored])
    return tally.state


class _Tally:
    """Adds up what has been read, and tells of it."""

    def __init__(self, total_bytes: int, progress: Callable[[LoadProgress], None] | None) -> None:
        self._start, self._progress = time.perf_counter(), progress
        self._told = 0.0
        self.state = LoadProgress("", 0, total_bytes, 0.0)

    def add(self, name: str, num_bytes: int) -> None:
        """More bytes of a stored tensor are behind us."""
        self.state = LoadProgress(
            name,
            self.state.loaded_bytes + num_bytes,
            self.state.total_bytes,
            time.perf_counter() - self._start,
        )
        is_last = self.state.loaded_bytes == self.state.total_bytes
        if self._progress is not None and (
            is_last or self.state.seconds - self._told >= TELL_EVERY
        ):
            self._told = self.state.seconds
            self._progress(self.state)


def _direct_job(slot: WeightSlot, whole: Tensor, info: TensorInfo) -> ReadJob | None:
    """The bytes to read for a slot, None where they do not lie side by side in a file (columns of
    a shared matrix, a .bin file) or are not stored at all."""
    if slot.is_zero or info.offset is None or whole.device.type not in PIECE_BYTES:
        return None
    offset, num_bytes = info.offset, _local_bytes(slot, info)
    if slot.source is not None:
        rest = zip(slot.source[1:], info.shape[1:], strict=True)
        if any((part.start, part.stop) != (0, size) for part, size in rest):
            return None
        offset += slot.source[0].start * (info.num_bytes // max(info.shape[0], 1))
    destination = slot.part_of(whole.detach())
    if not destination.is_contiguous():
        return None
    dtype: torch.dtype = getattr(torch, info.dtype)
    return ReadJob(info.name, info.file, offset, num_bytes, dtype, destination)


def _local_bytes(slot: WeightSlot, info: TensorInfo) -> int:
    """Stored bytes that this rank reads."""
    if slot.source is None or slot.is_zero:
        return 0 if slot.is_zero else info.num_bytes
    return info.num_bytes * math.prod(slot.local_shape) // max(math.prod(slot.shape), 1)


@torch.no_grad()
def _fill(whole: Tensor, slot: WeightSlot, tensor: Tensor) -> None:
    if slot.is_zero:
        slot.part_of(whole).zero_()
    else:  # stored tensors are mapped: only this rank's part is read
        slot.part_of(whole).copy_(tensor if slot.source is None else tensor[slot.source])


def _tied_embedding(
    name: str | None, info: TensorInfo, slots: Mapping[str, WeightSlot]
) -> str | None:
    """The slot whose parameter a stored head of a tied model repeats, None if it is no such."""
    if name is None or not f".{name}".endswith(f".{_HEAD}"):
        return None
    candidates = [
        slot_name
        for slot_name, slot in slots.items()
        if name in slot.aliases or f".{slot_name}".endswith(f".{_EMBEDDING}")
    ]
    if len(candidates) != 1 or slots[candidates[0]].shape != info.shape:
        return None
    return candidates[0]


def _require_equal_heads(checkpoint: Checkpoint, coverage: Coverage) -> None:
    by_slot = {slot: stored for stored, slot in coverage.sources.items()}
    for head_name, slot_name in coverage.tied:
        head, embedding = checkpoint.read(head_name), checkpoint.read(by_slot[slot_name])
        if not torch.equal(head.to(embedding.dtype), embedding):
            raise EyasError(
                f"config says tied, the checkpoint has its own head: {head_name} differs from "
                f"{by_slot[slot_name]} in {checkpoint.folder}; set tie_word_embeddings false in "
                "its config.json"
            )


def _show(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
