"""The places of a module tree that a checkpoint fills, by the checkpoint's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class WeightSlot:
    """One checkpoint tensor's place: rows [start, start + shape[0]) of the tensor at `path`.

    path: the parameter or buffer in the module tree. shape, dtype: of this part. aliases: other
    checkpoint names of the very same parameter (a tied head).
    """

    path: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()


def weight_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Every place that loading fills, by checkpoint name.

    A module with `parts` (name -> rows, in order) holds several checkpoint modules stacked on
    dim 0: its own last name component is replaced by each part's. Of a shared parameter, the first
    name in the tree counts and the others are aliases. Buffers that are saved belong to it too.
    """
    slots: dict[str, WeightSlot] = {}
    first_names: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for name, tensor in _own_tensors(module):
            path = f"{prefix}.{name}" if prefix else name
            if id(tensor) in first_names:
                first = first_names[id(tensor)]
                aliases = (*slots[first].aliases, path)
                slots[first] = dataclasses.replace(slots[first], aliases=aliases)
                continue
            first_names[id(tensor)] = path
            parts = getattr(module, "parts", None)
            if parts is None:
                slots[path] = WeightSlot(path, 0, tuple(tensor.shape), tensor.dtype)
                continue
            assert sum(parts.values()) == len(tensor), f"{path}: parts {parts} do not add up"
            parent = prefix.rpartition(".")[0]
            start = 0
            for part, num_rows in parts.items():
                part_name = ".".join(filter(None, (parent, part, name)))
                shape = (num_rows, *tensor.shape[1:])
                slots[part_name] = WeightSlot(path, start, shape, tensor.dtype)
                start += num_rows
    return slots


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
