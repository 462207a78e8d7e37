"""The places of a module tree that a checkpoint fills, by the checkpoint's names; and, where
several ranks share a model, the part of each stored tensor that belongs there."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eyas.models.sharding import Shard, WeightShards


class WeightSlot(NamedTuple):  # of which experts make a hundred thousand
    """One checkpoint tensor's place: some rows of the tensor at `path`, from `start` on.

    path: the parameter or buffer in the module tree. shape, dtype: of what is stored. aliases:
    other checkpoint names of the very same parameter (a tied head). stack: which matrix of a stack
    the rows are counted in, None where the tensor is no stack. source: the part of what is stored
    that this rank holds, None for all of it. is_here: False for other ranks' experts. is_zero: a
    bias that another rank adds.
    """

    path: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()
    stack: int | None = None
    source: tuple[slice, ...] | None = None
    is_here: bool = True
    is_zero: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """What this rank holds of it; as `shape` for other ranks' experts."""
        if self.source is None:
            return self.shape
        return tuple(part.stop - part.start for part in self.source)

    def part_of(self, whole: Tensor) -> Tensor:
        """The rows of the tensor at `path` that this slot is."""
        if self.stack is not None:
            whole = whole[self.stack]
        return whole if whole.dim() == 0 else whole[self.start : self.start + self.local_shape[0]]


@dataclasses.dataclass(frozen=True)
class StoredNames:
    """How a target's checkpoints name its weights.

    rename: stored name -> name in the module tree. ignored: by prefix of the renamed name, tensors
    that may be stored and are not read, and why.
    """

    rename: Callable[[str], str] | None = None
    ignored: Mapping[str, str] = dataclasses.field(default_factory=dict)


def stored_names(model: nn.Module) -> StoredNames:
    """A model's own `stored_names`, where it has them: else stored names are those of the tree."""
    own = getattr(model, "stored_names", None)
    return StoredNames() if own is None else own()


def weight_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Every place that loading fills, by checkpoint name.

    A module with `parts` (name -> rows, in order) holds several checkpoint modules stacked on
    dim 0: its own last name component is replaced by each part's; `part_rows(tensor)`, where it
    has that method, gives the rows in one of its tensors. A module with `num_stacked` too holds as
    many matrices on a dim before that one; the checkpoint names them `{i}.{part}`. `shards` says
    which part of the stored tensors a module holds, `stack_shard` which matrices. Of a shared
    parameter, the first name in the tree counts and the others are aliases. Buffers that are saved
    belong to it too.
    """
    slots: dict[str, WeightSlot] = {}
    first_names: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for name, tensor in _own_tensors(module):
            path = f"{prefix}.{name}" if prefix else name
            if id(tensor) in first_names:
                first = first_names[id(tensor)]
                aliases = (*slots[first].aliases, path)
                slots[first] = slots[first]._replace(aliases=aliases)
                continue
            first_names[id(tensor)] = path
            if getattr(module, "parts", None) is None:
                where = _stored(module, name, "", tuple(tensor.shape))
                slots[path] = WeightSlot(path, 0, where[0], tensor.dtype, source=where[1])
                if where[2]:
                    slots[path] = slots[path]._replace(is_zero=True)
            else:
                slots.update(_part_slots(prefix, module, name, tensor))
    return slots


def _part_slots(
    prefix: str, module: nn.Module, name: str, tensor: Tensor
) -> Iterator[tuple[str, WeightSlot]]:
    path, parent = f"{prefix}.{name}".lstrip("."), prefix.rpartition(".")[0]
    parts: Mapping[str, int] = module.parts  # type: ignore[assignment]
    if hasattr(module, "part_rows"):
        parts = module.part_rows(name)  # type: ignore[operator]
    num_stacked = getattr(module, "num_stacked", None)
    shape = tuple(tensor.shape[1:]) if num_stacked is not None else tuple(tensor.shape)
    assert sum(parts.values()) == shape[0], f"{path}: parts {parts} do not add up"
    before, dtype = f"{parent}." if parent else "", tensor.dtype
    starts = itertools.accumulate(parts.values(), initial=0)
    rows = []
    for (part, num_rows), start in zip(parts.items(), starts, strict=False):
        stored, source, is_zero = _stored(module, name, part, (num_rows, *shape[1:]))
        slot = WeightSlot(path, start, stored, dtype, source=source, is_zero=is_zero)
        rows.append((f"{part}.{name}", slot))
    if num_stacked is None:
        for last, slot in rows:
            yield before + last, slot
        return
    shard: Shard = getattr(module, "stack_shard", Shard(0, num_stacked, num_stacked))
    for number in range(shard.full):
        stack = number - shard.start
        is_here = 0 <= stack < num_stacked
        place = (stack, True) if is_here else (None, False)
        for last, slot in rows:
            slot = WeightSlot(*slot[:5], place[0], slot.source, place[1], slot.is_zero)
            yield f"{before}{number}.{last}", slot


def _stored(
    module: Any, name: str, part: str, local: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[slice, ...] | None, bool]:
    """(shape of the stored tensor, this rank's part of it, whether another rank adds it) of one
    part of a module's tensor, without its stack."""
    shards: WeightShards | None = getattr(module, "shards", None)
    if shards is None:
        return local, None, False
    outputs, inputs = shards.outputs.get(part), shards.inputs
    is_zero = name == "bias" and inputs is not None and inputs.start > 0
    by_dim = [outputs, inputs if len(local) > 1 else None]
    pieces = [
        (slice(0, size), size) if shard is None else shard.scaled(size)
        for shard, size in zip(by_dim, local, strict=False)
    ]
    return tuple(size for _, size in pieces), tuple(piece for piece, _ in pieces), is_zero


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers of one module, without its children's."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def materialize(model: nn.Module, path: str, device: torch.device | str) -> Tensor:
    """The tensor at `path`; one on the meta device is replaced by empty memory on `device`, at
    every place of the tree that shares it."""
    parent, _, name = path.rpartition(".")
    module = model.get_submodule(parent)
    old = getattr(module, name)
    assert isinstance(old, Tensor)
    if not old.is_meta:
        return old
    new = torch.empty_like(old, device=device)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    for holder in model.modules():
        for table in (holder._parameters, holder._buffers):
            for key, value in table.items():
                if value is old:
                    table[key] = new  # type: ignore[assignment]
    return new
