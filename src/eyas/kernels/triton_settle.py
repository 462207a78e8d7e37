# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
"""Acceptance, emission and the slots' next state in one Triton launch, a program a request.

The rules are those of `reference.walk_tree`, `reference.cut_emitted` and, for benchmarks,
`speculative.simulate`.

Shape suffixes: B requests, N tree nodes, E = depth + 1 emitted at most, S slots, P pages,
M stop ids, V vocabulary, D draft levels.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.reference import FINISH_LENGTH, FINISH_STOP
from eyas.kernels.triton_launch import launch_options, let_next_start, wait_for_inputs
from eyas.kernels.triton_numbers import noise_keys, uniform

_STOP, _LENGTH = tl.constexpr(FINISH_STOP), tl.constexpr(FINISH_LENGTH)


@dataclasses.dataclass(frozen=True)
class SlotTensors:
    """The tensors of the slots that acceptance reads and moves (speculative.state.SlotState)."""

    length_S: Tensor
    pending_S: Tensor
    remaining_S: Tensor
    emitted_S: Tensor
    active_S: Tensor
    max_draft_S: Tensor
    seed_S: Tensor
    stop_ids_SM: Tensor
    page_table_SP: Tensor
    output_count_SV: Tensor

    @staticmethod
    def of(state: object) -> SlotTensors:
        """The tensors of these names that a state holds now."""
        names = (field.name for field in dataclasses.fields(SlotTensors))
        return SlotTensors(*(getattr(state, name) for name in names))


@dataclasses.dataclass(frozen=True)
class Places:
    """Where rows are. Scratch rows of a slot start at first_scratch + slot * num_scratch."""

    page_size: int
    trash_row: int
    trash_page: int
    first_scratch: int
    num_scratch: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a round comes to, int64. packed: [B, E + 3] as RoundOutput; all others are by request
    or by request and step, flattened.

    emitted_T; row_T: rows of the verification along the path. source_T, destination_T: pool rows
    to copy. position_T, entry_row_T, page_T: the draft's entries, with the page that one ends (or
    the trash page). last_B: each request's last valid step as a row; num_emitted_B. pending_B,
    length_B, last_position_B: after the round.
    """

    packed: Tensor
    emitted_T: Tensor
    row_T: Tensor
    source_T: Tensor
    destination_T: Tensor
    position_T: Tensor
    entry_row_T: Tensor
    page_T: Tensor
    last_B: Tensor
    num_emitted_B: Tensor
    pending_B: Tensor
    length_B: Tensor
    last_position_B: Tensor


@triton.jit
def _settle_kernel(
    slots_B,
    token_BN,
    parent_BN,
    chosen_BN,
    rate_D,
    length_S,
    pending_S,
    remaining_S,
    emitted_S,
    active_S,
    max_draft_S,
    seed_S,
    stop_ids_SM,
    num_stops,
    stop_stride,
    page_table_SP,
    num_pages,
    count_SV,
    vocab_size,
    trash_row,
    trash_page,
    first_scratch,
    num_scratch,
    packed,
    emitted_T,
    row_T,
    source_T,
    destination_T,
    position_T,
    entry_row_T,
    page_T,
    last_B,
    num_emitted_B,
    pending_B,
    length_B,
    last_position_B,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    PAGE: tl.constexpr,
    SIMULATE: tl.constexpr,
    COUNT: tl.constexpr,
    N: tl.constexpr,
    EP: tl.constexpr,
    M: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    request = tl.program_id(0)
    slot = tl.load(slots_B + request)
    length = tl.load(length_S + slot)
    remaining = tl.load(remaining_S + slot)
    active = tl.load(active_S + slot).to(tl.int64)
    node, step = tl.arange(0, N), tl.arange(0, EP)
    used = node < NODES
    cell = request * NODES + node
    token = tl.load(token_BN + cell, mask=used, other=-1)
    parent = tl.load(parent_BN + cell, mask=used, other=-1).to(tl.int32)
    chosen = tl.load(chosen_BN + cell, mask=used, other=-1)

    # The walk from the root: path holds its nodes, and the last of them past its end.
    at = tl.zeros((), tl.int32)
    walking = tl.full((), 1, tl.int32)
    num_accepted = tl.zeros((), tl.int32)
    path = tl.zeros((EP,), tl.int32)
    emitted = tl.zeros((EP,), tl.int64)
    drafted = tl.zeros((EP,), tl.int64)
    if SIMULATE:
        key_a, key_b = noise_keys(tl.load(seed_S + slot), length)
    for level in range(DEPTH):
        choice = tl.sum(tl.where(node == at, chosen, 0), axis=0)
        emitted = tl.where(step == level, choice, emitted)
        child = used & (parent == at)
        if not SIMULATE:
            child &= token == choice
        best = tl.min(tl.where(child, node, N), axis=0)
        found = (best < N).to(tl.int32)
        if SIMULATE:
            # Whether the level is taken, by the noise's own uniform; the path goes on regardless.
            chance = 1.0 - uniform(key_a, key_b, tl.zeros((), tl.int32) + level)
            walking = walking & (chance < tl.load(rate_D + level)).to(tl.int32)
            num_accepted = tl.where(
                found > 0, num_accepted + walking, tl.minimum(num_accepted, level)
            )
            walking = walking & found
        else:
            walking = walking & found
            num_accepted += walking
            found = walking
        at = tl.where(found > 0, best, at)
        path = tl.where(step == level + 1, at, path)
        drafted = tl.where(step == level, tl.sum(tl.where(node == at, token, 0), axis=0), drafted)
    choice = tl.sum(tl.where(node == at, chosen, 0), axis=0)
    emitted = tl.where(step == DEPTH, choice, emitted)
    if SIMULATE:
        emitted = tl.where(step < num_accepted, drafted, emitted)
    limit = tl.load(max_draft_S + slot)
    accepted = tl.minimum(num_accepted.to(tl.int64), limit)

    # The cut at the first stop token, or at the length limit.
    stop_id = tl.arange(0, M)
    stop = tl.load(stop_ids_SM + slot * stop_stride + stop_id, mask=stop_id < num_stops, other=-1)
    is_stop = tl.max((emitted[:, None] == stop[None, :]).to(tl.int32), axis=1)
    first_stop = tl.min(tl.where((is_stop > 0) & (step <= DEPTH), step, EP), axis=0).to(tl.int64)
    num = tl.minimum(accepted + 1, remaining)
    stopped = first_stop < num
    num = tl.where(stopped, first_stop + 1, num)
    finish = tl.where(stopped, _STOP, tl.where(num >= remaining, _LENGTH, 0)).to(tl.int64) * active
    num = num * active

    # The slots' next state.
    last = tl.maximum(num - 1, 0)
    final = tl.sum(tl.where(step == last, emitted, 0), axis=0)
    pending = tl.where(num > 0, final, tl.load(pending_S + slot))
    tl.store(remaining_S + slot, remaining - num)
    tl.store(emitted_S + slot, tl.load(emitted_S + slot) + num)
    tl.store(active_S + slot, (active * (finish == 0)).to(tl.int8))
    tl.store(length_S + slot, length + num)
    tl.store(pending_S + slot, pending)
    tl.store(pending_B + request, pending)
    tl.store(length_B + request, length + num)
    tl.store(last_position_B + request, tl.maximum(length + num - 1, 0))
    tl.store(num_emitted_B + request, num)
    tl.store(last_B + request, request * (DEPTH + 1) + last)
    valid = step < num
    if COUNT:
        one = tl.full((EP,), 1, tl.int32)
        tl.atomic_add(count_SV + slot * vocab_size + emitted, one, mask=valid)

    # What the host is told.
    row = packed + request * (DEPTH + 4)
    inside = step <= DEPTH
    tl.store(row + step, emitted, mask=inside)
    tl.store(row + DEPTH + 1, num)
    tl.store(row + DEPTH + 2, finish)
    tl.store(row + DEPTH + 3, accepted)

    # Rows to copy from scratch to the pages, and the draft's entries, which lie one further on.
    out = request * (DEPTH + 1) + step
    index = tl.where(valid, length + step, 0)
    pages = page_table_SP + slot * num_pages
    page = tl.load(pages + index // PAGE, mask=valid, other=0)
    entry = tl.where(valid, index + 1, 0)
    entry_page = tl.load(pages + entry // PAGE, mask=valid, other=0)
    destination = tl.where(valid, page * PAGE + index % PAGE, trash_row)
    entry_row = tl.where(valid, entry_page * PAGE + entry % PAGE, trash_row)
    ended = tl.where(valid & (entry % PAGE == 0), page, trash_page)
    tl.store(emitted_T + out, emitted, mask=inside)
    tl.store(row_T + out, (request * NODES + path).to(tl.int64), mask=inside)
    tl.store(source_T + out, first_scratch + slot * num_scratch + path, mask=inside)
    tl.store(destination_T + out, destination, mask=inside)
    tl.store(position_T + out, length + step, mask=inside)
    tl.store(entry_row_T + out, entry_row, mask=inside)
    tl.store(page_T + out, ended, mask=inside)


def settle(
    slots: SlotTensors,
    places: Places,
    slots_B: Tensor,
    token_BN: Tensor,
    parent_BN: Tensor,
    chosen_T: Tensor,
    *,
    depth: int,
    count: bool,
    rate_D: Tensor | None = None,
) -> Outcome:
    """Accept, emit, and move the slots. count: emitted tokens are counted for penalties. rate_D:
    chances by level of a simulated acceptance."""
    (num_requests, num_nodes), width = token_BN.shape, depth + 1
    numbers = functools.partial(torch.empty, dtype=torch.int64, device=slots_B.device)
    outcome = Outcome(
        numbers(num_requests, width + 3),
        *(numbers(num_requests * width) for _ in range(7)),
        *(numbers(num_requests) for _ in range(5)),
    )
    outputs = [getattr(outcome, field.name) for field in dataclasses.fields(outcome)]
    _settle_kernel[(num_requests,)](
        slots_B,
        token_BN,
        parent_BN,
        chosen_T,
        slots.seed_S if rate_D is None else rate_D,
        slots.length_S,
        slots.pending_S,
        slots.remaining_S,
        slots.emitted_S,
        slots.active_S.view(torch.int8),
        slots.max_draft_S,
        slots.seed_S,
        slots.stop_ids_SM,
        slots.stop_ids_SM.shape[1],
        slots.stop_ids_SM.stride(0),
        slots.page_table_SP,
        slots.page_table_SP.shape[1],
        slots.output_count_SV,
        slots.output_count_SV.shape[1],
        places.trash_row,
        places.trash_page,
        places.first_scratch,
        places.num_scratch,
        *outputs,
        NODES=num_nodes,
        DEPTH=depth,
        PAGE=places.page_size,
        SIMULATE=rate_D is not None,
        COUNT=count,
        N=triton.next_power_of_2(num_nodes),
        EP=triton.next_power_of_2(width),
        M=triton.next_power_of_2(slots.stop_ids_SM.shape[1]),
        num_warps=1,
        **launch_options(),
    )
    return outcome
