"""The plan at length (`eyas check --explain`): boundaries, shapes, KV layouts, bytes, backends."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from eyas.contract.attention import KVLayout
from eyas.engine.check_report import Section
from eyas.engine.device import backends
from eyas.engine.memory_plan import MemoryNeed, MemoryPlan
from eyas.models.checkpoint import Checkpoint
from eyas.models.config import DraftConfig, ModelConfig
from eyas.models.weight_slots import WeightSlot


@dataclasses.dataclass(frozen=True)
class ExplainedModel:
    """One side as far as it could be read. role: "target" or "draft"."""

    role: str
    config: ModelConfig
    model: nn.Module | None
    checkpoint: Checkpoint | None
    slots: Mapping[str, WeightSlot]


def explain(
    models: list[ExplainedModel],
    draft: DraftConfig | None,
    need: MemoryNeed | None,
    plan: MemoryPlan | None,
    device: str | None,
) -> tuple[Section, ...]:
    """The sections for which enough is known, in the order of reading."""
    sections = [_shapes(models), _weights(models)]
    if draft is not None:
        sections.insert(0, _boundaries(draft, models[0].config))
    if need is not None and plan is not None:
        sections += [_kv(need), _bytes(need, plan), _limits(plan)]
    if device is not None:
        rows = [{"part": part, "backend": name} for part, name in backends(device).items()]
        sections.append(Section("backends", f"on {device}", tuple(rows)))
    return tuple(section for section in sections if section.rows)


def _boundaries(draft: DraftConfig, target: ModelConfig) -> Section:
    width, last = draft.target_hidden_size, target.num_layers
    rows = []
    for index, boundary in enumerate(draft.boundaries):
        state = f"residual stream entering layer {boundary}"
        if boundary == last:
            state = f"residual stream after layer {last - 1}, before the final norm"
        columns = f"{index * width}..{(index + 1) * width - 1}"
        rows.append({"boundary": boundary, "state": state, "fc_columns": columns})
    return Section("boundaries", draft.boundary_rule, tuple(rows))


def _shapes(models: list[ExplainedModel]) -> Section:
    rows = []
    for side in models:
        config = side.config
        biases = [
            name for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm") if getattr(config, name)
        ]
        rows.append(
            {
                "model": side.role,
                "architecture": config.architecture,
                "layers": config.num_layers,
                "hidden": config.hidden_size,
                "intermediate": config.intermediate_size,
                "heads": config.num_heads,
                "kv_heads": config.num_kv_heads,
                "head_dim": config.head_dim,
                "vocabulary": config.vocab_size,
                "with": ", ".join(biases) or "-",
            }
        )
    return Section("shapes", "what will be built", tuple(rows))


def _weights(models: list[ExplainedModel]) -> Section:
    rows: list[dict[str, Any]] = []
    for side in models:
        if side.model is None:
            continue
        slots = side.slots
        row: dict[str, Any] = {
            "model": side.role,
            "tensors": len(slots),
            "parameters": sum(_num_weights(name, slot) for name, slot in slots.items()),
            "files": 0,
            "stored_bytes": 0,
            "stored_as": "no weight files",
        }
        if side.checkpoint is not None:
            row |= {
                "files": len(side.checkpoint.files),
                "stored_bytes": side.checkpoint.num_bytes,
                "stored_as": ", ".join(_dtypes(side.checkpoint)),
            }
        rows.append(row)
    return Section("weights", "what will be filled, and what is stored", tuple(rows))


def _num_weights(name: str, slot: WeightSlot) -> int:
    """Numbers that a slot stands for: eight in a packed int32, none in its scales."""
    if name.endswith(("weight_scale", "weight_scale_inv")):
        return 0
    return math.prod(slot.shape) * (8 if name.endswith("weight_packed") else 1)


def _dtypes(checkpoint: Checkpoint) -> Iterator[str]:
    counts = Counter(info.dtype for info in checkpoint.tensors.values())
    return (dtype for dtype, _ in counts.most_common())


def _kv(need: MemoryNeed) -> Section:
    layouts = {"target": need.target_layout, "draft": need.draft_layout}
    rows = tuple(_kv_row(role, layout, need) for role, layout in layouts.items() if layout)
    return Section("KV cache", f"pages of {need.page_size} tokens, shared page ids", rows)


def _kv_row(role: str, layout: KVLayout, need: MemoryNeed) -> dict[str, Any]:
    per_token = layout.elements_per_token * need.dtype.itemsize
    return {
        "model": role,
        "layers": layout.num_layers,
        "kv_heads": layout.num_kv_heads,
        "key_dim": layout.head_dim,
        "value_dim": layout.value_dim,
        "dtype": str(need.dtype).removeprefix("torch."),
        "token_bytes": per_token,
        "page_bytes": per_token * need.page_size,
    }


def _bytes(need: MemoryNeed, plan: MemoryPlan) -> Section:
    batch, length = need.max_batch_size, plan.max_model_len
    phases = need.activations.phases(batch, length)
    worst = max(phases, key=lambda phase: phases[phase])
    parts = {
        "target weights": (plan.target_weight_bytes, ""),
        "draft weights": (plan.draft_weight_bytes, "what it does not share with the target"),
        "packed copies": (plan.packed_bytes, "a head beside an embedding that is looked up"),
        "KV pages": (plan.kv_bytes, f"{plan.num_pages} pages, {plan.kv_tokens} tokens"),
        "page ends": (plan.page_end_bytes, "the draft's input at each page's last token"),
        "scratch": (plan.scratch_bytes, "rows of drafted tokens, by slot"),
        "slots": (plan.slot_bytes, f"{batch} requests and one for padding; penalty counts"),
        "tables": (plan.table_bytes, f"rotation of {length} positions"),
        "activations": (plan.activation_bytes, f"worst in: {worst}"),
        "total": (plan.total_bytes, "fits" if plan.fits else "does not fit"),
    }
    rows = [
        {"part": part, "bytes": size, "for": note} for part, (size, note) in parts.items() if size
    ]
    if plan.budget_bytes is not None:
        rows.append({"part": "available", "bytes": plan.budget_bytes, "for": "headroom left out"})
    return Section("memory", f"{batch} requests, model length {length}", tuple(rows))


def _limits(plan: MemoryPlan) -> Section:
    limits = {
        "longest request, alone": plan.longest_one,
        "longest length of the whole batch": plan.longest_batch,
        "most requests of the model length": plan.largest_batch,
    }
    rows = ({"limit": name, "value": value} for name, value in limits.items() if value is not None)
    return Section("what fits", "each with the other settings as they are", tuple(rows))
