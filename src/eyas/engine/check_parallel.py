"""How target and draft divide among ranks: what does not, and how many ranks would do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from eyas.comm.group import Group
from eyas.contract.attention import KVLayout
from eyas.engine.memory_plan import MemoryNeed, plan_memory
from eyas.models.config import DraftConfig, ModelConfig
from eyas.models.findings import Findings
from eyas.models.sharding import Parallel, undivided

_MOST_RANKS = 64  # suggested at most


@dataclasses.dataclass(frozen=True)
class Division:
    """How a target is divided. parallel: as asked; where that cannot be, over the fewest ranks that
    divide it, so that the rest can be checked. sizes: numbers of ranks above one that divide it.
    undivided: what does not divide as asked, in words."""

    asked: int
    parallel: Parallel
    sizes: tuple[int, ...]
    undivided: tuple[str, ...]


def divide(target: ModelConfig, *, num_ranks: int, expert_parallel: bool) -> Division:
    """Find out whether a target divides among so many ranks, or among which number it does."""

    def over(size: int) -> Parallel:
        return Parallel(Group(0, size), expert_parallel and target.experts is not None)

    most = min(max(target.num_heads, 2), _MOST_RANKS)
    sizes = tuple(size for size in range(2, most + 1) if not undivided(target, over(size)))
    wrong = tuple(undivided(target, over(num_ranks)).values())
    measured = num_ranks if not wrong else next(iter(sizes), 1)
    return Division(num_ranks, over(measured), sizes, wrong)


def report_division(
    division: Division,
    target: ModelConfig,
    *,
    expert_parallel: bool,
    num_devices: int | None,
    fitting: Callable[[], Sequence[int]] | None,
    findings: Findings,
) -> None:
    """Report what does not divide, with the numbers of ranks that would do.

    num_devices: how many there are, None where any number will do. fitting: which of the sizes the
    memory allows, None where that is not known.
    """
    if expert_parallel and target.experts is None:
        findings.error(
            "settings",
            "expert-parallel",
            f"{target.architecture} has no experts to divide",
            "leave --expert-parallel out",
        )
    if num_devices is not None and division.asked > num_devices:
        findings.error(
            "device",
            "device-count",
            f"--tp {division.asked} needs as many GPUs, and {num_devices} are visible",
            f"use --tp {num_devices} or less, or look at CUDA_VISIBLE_DEVICES",
        )
    if not division.undivided:
        return
    hint = "it runs on one rank only: leave --tp out"
    if division.sizes:
        hint = f"use --tp {_either(division.sizes)}"
        fit = division.sizes if fitting is None else tuple(fitting())
        if fit and fit != division.sizes:
            hint = (
                f"use --tp {_either(fit)}, which fit the memory ({_either(division.sizes)} divide "
                "the model)"
            )
        elif not fit:
            hint += ", on devices with more memory: with none of these it fits these ones"
    findings.error(
        "target",
        "tensor-parallel-size",
        f"{division.asked} ranks do not divide {', '.join(division.undivided)}",
        hint,
    )


def report_draft_division(draft: DraftConfig, parallel: Parallel, findings: Findings) -> None:
    """Warn of what each rank will hold whole: it works, and takes memory and time."""
    whole = undivided(draft.decoder, parallel)
    if whole:
        findings.warn(
            "draft",
            "draft-replicated",
            f"{parallel.group.size} ranks do not divide {', '.join(whole.values())} of the draft: "
            "each rank holds and computes all of them",
            "the output does not change; the draft is no faster than on one rank",
        )


def describe_ranks(target: ModelConfig, draft: DraftConfig | None, parallel: Parallel) -> str:
    """One line on what a rank holds."""
    text = f"{parallel.group.size}, each with {_part(target, parallel)}"
    if draft is not None:
        text += f"; of the draft with {_part(draft.decoder, parallel)}"
    return text


def _part(model: ModelConfig, parallel: Parallel) -> str:
    heads = parallel.attention(model)
    parts = [f"{heads.q.size} of {heads.q.full} heads"]
    if model.latent is not None:
        parts.append("the whole latent KV")
    else:
        text = f"{heads.kv.size} of {heads.kv.full} KV heads"
        if heads.kv.size * parallel.group.size > heads.kv.full and not heads.kv.is_whole:
            text += f" (one on {parallel.group.size // heads.kv.full} ranks)"
        parts.append(text)
    experts = model.experts
    if experts is not None:
        number, inner = parallel.experts(model)
        parts.append(f"{number.size} of {number.full} experts ({inner.size} of {inner.full} inner)")
    if experts is None or len(experts.layers) < model.num_layers:
        inner = parallel.mlp(model, model.intermediate_size, "mlp")
        parts.append(f"{inner.size} of {inner.full} inner elements")
    rows = parallel.vocabulary(model.vocab_size)
    parts.append(f"{rows.size} of {rows.full} tokens")
    return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class RankBytes:
    """Weights of one model: on each of num_ranks (> 1), and the whole of them."""

    local: int
    full: int
    num_ranks: int

    def over(self, num_ranks: int) -> int:
        """On each of another number of ranks."""
        divided = (self.full - self.local) * self.num_ranks // (self.num_ranks - 1)
        return self.full - divided + -(-divided // num_ranks)


def fitting_sizes(
    need: MemoryNeed,
    sizes: Sequence[int],
    *,
    target: RankBytes,
    draft: RankBytes | None,
    budget_bytes: int,
) -> list[int]:
    """Numbers of ranks with which everything fits into each device."""
    found = []
    for size in sizes:
        parallel = Parallel(Group(0, size), need.parallel.expert_parallel)
        draft_layout = need.draft_layout
        if draft_layout is not None and need.draft is not None:
            draft_layout = _layout(draft_layout, need.draft.decoder, parallel)
        asked = dataclasses.replace(
            need,
            parallel=parallel,
            target_weight_bytes=target.over(size),
            draft_weight_bytes=0 if draft is None else draft.over(size),
            target_layout=_layout(need.target_layout, need.target, parallel),
            draft_layout=draft_layout,
        )
        if plan_memory(asked, budget_bytes=budget_bytes).fits:
            found.append(size)
    return found


def _layout(layout: KVLayout, model: ModelConfig, parallel: Parallel) -> KVLayout:
    return dataclasses.replace(layout, num_kv_heads=parallel.attention(model).kv.size)


def _either(sizes: Sequence[int]) -> str:
    *first, last = map(str, sizes)
    return f"{', '.join(first)} or {last}" if first else last
