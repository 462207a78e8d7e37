"""Entry points of native_round.c: a greedy round between the models' forwards, a call a step.

Each takes the place of some ten torch operations of microseconds. All tensors are int64 on the CPU
unless said otherwise.

Shape suffixes: B requests, N nodes, E = depth + 1 emitted at most, S slots, P pages, K candidates,
M stop ids, T rows, H draft hidden, V draft vocabulary, L layers, R rows of the cache.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from eyas.kernels import native

_Pointer, _Count = ctypes.c_void_p, ctypes.c_ssize_t


class _Places(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("page_size", "trash_row", "trash_page", "first_scratch", "num_scratch")
    ]


class _Outcome(ctypes.Structure):
    _fields_ = [
        *((name, _Pointer) for name in ("packed", "emitted", "row", "source", "destination")),
        *((name, _Pointer) for name in ("position", "entry_row", "page", "last", "moved")),
        *((name, _Pointer) for name in ("pending", "length", "last_position")),
    ]


@functools.cache
def _entry(name: str) -> Any:
    """A function of the library; None where there is no library."""
    arguments: dict[str, list[Any]] = {
        "round_begin": [*[_Pointer] * 2, *[_Count] * 2, *[_Pointer] * 5],
        "chain_shape": [*[_Count] * 2, *[_Pointer] * 3],
        "chain_begin": [
            *[_Pointer] * 2,
            *[_Count] * 2,
            _Pointer,
            _Count,
            _Pointer,
            _Count,
            *[_Pointer] * 3,
        ],
        "chain_advance": [_Pointer, *[_Count] * 3, *[_Pointer] * 3, *[_Count] * 2],
        "first_level": [_Pointer, *[_Count] * 3, *[_Pointer] * 3, _Count, *[_Pointer] * 4],
        "round_settle": [*[_Pointer] * 3, *[_Count] * 3, *[_Pointer] * 4],
        "copy_rows": [_Pointer, *[_Count] * 3, *[_Pointer] * 2, *[_Count] * 2],
        "keep_hidden": [_Pointer, *[_Count] * 2, *[_Pointer] * 5, _Count, *[_Pointer] * 2],
    }
    return native.entry(name, *arguments[name])


@dataclasses.dataclass(frozen=True)
class SlotTensors:
    """The tensors of the slots that a round reads and moves (speculative.state.SlotState), which
    stay where they are. active_S: bool."""

    length_S: Tensor
    pending_S: Tensor
    remaining_S: Tensor
    emitted_S: Tensor
    active_S: Tensor
    max_draft_S: Tensor
    stop_ids_SM: Tensor
    page_table_SP: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """In the order of the fields."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]


@dataclasses.dataclass(frozen=True)
class Begun:
    """Where a round starts. draft_end_B: what the draft sees of the pages ends there; position_BN:
    of a chain's nodes; draft_position_DB: of the draft's levels."""

    length_B: Tensor
    draft_end_B: Tensor
    page_table_BP: Tensor
    position_BN: Tensor
    draft_position_DB: Tensor


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a round comes to; as triton_settle.Outcome. packed: [B, E + 3]; by request and step:
    emitted_T, row_T, source_T, destination_T, position_T, entry_row_T, page_T; by request the
    rest, num_emitted_B as moved_B."""

    packed: Tensor
    emitted_T: Tensor
    row_T: Tensor
    source_T: Tensor
    destination_T: Tensor
    position_T: Tensor
    entry_row_T: Tensor
    page_T: Tensor
    last_B: Tensor
    moved_B: Tensor
    pending_B: Tensor
    length_B: Tensor
    last_position_B: Tensor


class RoundKernels:
    """The steps over one set of slots, whose tensors are contiguous."""

    def __init__(self, slots: SlotTensors) -> None:
        self._kept = slots  # the plan holds bare pointers
        tensors = slots.tensors
        assert all(t.is_contiguous() for t in tensors)
        self._num_pages = slots.page_table_SP.shape[1]
        # The struct Slots of native_round.c, whose fields are all of eight bytes.
        pointers = [t.data_ptr() for t in tensors]
        self._plan = torch.tensor([*pointers, slots.stop_ids_SM.shape[1], self._num_pages])
        self._address = self._plan.data_ptr()

    def begin(self, slots_B: Tensor, num_nodes: int) -> Begun:
        """Gather what the slots know, for chains of so many nodes."""
        num_requests, num_levels = len(slots_B), max(num_nodes - 2, 0)
        length_B, end_B = torch.empty(2, num_requests, dtype=torch.int64).unbind()
        table_BP = torch.empty(num_requests, self._num_pages, dtype=torch.int64)
        position_BN = torch.empty(num_requests, num_nodes, dtype=torch.int64)
        draft_position_DB = torch.empty(num_levels, num_requests, dtype=torch.int64)
        _entry("round_begin")(
            self._address,
            slots_B.data_ptr(),
            num_requests,
            num_nodes,
            length_B.data_ptr(),
            end_B.data_ptr(),
            table_BP.data_ptr(),
            position_BN.data_ptr(),
            draft_position_DB.data_ptr(),
        )
        return Begun(length_B, end_B, table_BP, position_BN, draft_position_DB)

    def chain(
        self, slots_B: Tensor, num_nodes: int, *, candidate_SK: Tensor, hidden_SH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(token_BN with its first two columns, those of the second alone, the hidden states that
        they come from [B, H]); num_nodes 1: the first column."""
        num_requests = len(slots_B)
        token_BN = torch.empty(num_requests, num_nodes, dtype=torch.int64)
        next_B = torch.empty(num_requests, dtype=torch.int64)
        hidden_BH = hidden_SH.new_empty(num_requests, hidden_SH.shape[1])
        _entry("chain_begin")(
            self._address,
            slots_B.data_ptr(),
            num_requests,
            num_nodes,
            candidate_SK.data_ptr(),
            candidate_SK.shape[1],
            hidden_SH.data_ptr(),
            _row_bytes(hidden_SH),
            token_BN.data_ptr(),
            next_B.data_ptr(),
            hidden_BH.data_ptr(),
        )
        return token_BN, next_B, hidden_BH

    def settle(
        self,
        slots_B: Tensor,
        token_BN: Tensor,
        parent_BN: Tensor,
        chosen_T: Tensor,
        *,
        num_steps: int,
        places: tuple[int, int, int, int, int],
    ) -> Outcome:
        """Accept, emit, and move the slots. places: page size, trash row and page, the first
        scratch row of all slots and how many one has."""
        num_requests, num_nodes = token_BN.shape
        packed = torch.empty(num_requests, num_steps + 3, dtype=torch.int64)
        by_step = torch.empty(7, num_requests * num_steps, dtype=torch.int64).unbind()
        by_request = torch.empty(5, num_requests, dtype=torch.int64).unbind()
        tensors = (packed, *by_step, *by_request)
        outcome, where = _Outcome(*(t.data_ptr() for t in tensors)), _Places(*places)
        token_BN, parent_BN = token_BN.contiguous(), parent_BN.contiguous()
        _entry("round_settle")(
            self._address,
            ctypes.addressof(where),
            slots_B.data_ptr(),
            num_requests,
            num_nodes,
            num_steps,
            token_BN.data_ptr(),
            parent_BN.data_ptr(),
            chosen_T.data_ptr(),
            ctypes.addressof(outcome),
        )
        return Outcome(*tensors)


def chain_shape(num_requests: int, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """(parent_BN, depth_BN, visible_BNN) of chains, as speculative.tree.chain_tree makes them."""
    parent_BN, depth_BN = torch.empty(2, num_requests, num_nodes, dtype=torch.int64).unbind()
    visible_BNN = torch.empty(num_requests, num_nodes, num_nodes, dtype=torch.bool)
    _entry("chain_shape")(
        num_requests,
        num_nodes,
        parent_BN.data_ptr(),
        depth_BN.data_ptr(),
        visible_BNN.data_ptr(),
    )
    return parent_BN, depth_BN, visible_BNN


def best_tokens(logits_BV: Tensor, target_id_V: Tensor, *, into: tuple[Tensor, int]) -> Tensor:
    """The target's ids of the best logits [B], also into a column of chains [B, N]."""
    token_BN, column = into
    num_requests, vocab_size = logits_BV.shape
    next_B = torch.empty(num_requests, dtype=torch.int64)
    _entry("chain_advance")(
        logits_BV.data_ptr(),
        logits_BV.dtype is torch.bfloat16,
        num_requests,
        vocab_size,
        target_id_V.data_ptr(),
        next_B.data_ptr(),
        token_BN.data_ptr(),
        token_BN.shape[1],
        column,
    )
    return next_B


def store_first_level(
    logits_BV: Tensor,
    target_id_V: Tensor,
    slots_B: Tensor,
    hidden_BH: Tensor,
    *,
    candidate_S1: Tensor,
    score_S1: Tensor,
    hidden_SH: Tensor,
) -> None:
    """The slots' one first candidate each, its score (fp32) 0, and its hidden state."""
    num_requests, vocab_size = logits_BV.shape
    work_B = torch.empty(num_requests, dtype=torch.int64)
    _entry("first_level")(
        logits_BV.data_ptr(),
        logits_BV.dtype is torch.bfloat16,
        num_requests,
        vocab_size,
        target_id_V.data_ptr(),
        slots_B.data_ptr(),
        hidden_BH.data_ptr(),
        _row_bytes(hidden_BH),
        candidate_S1.data_ptr(),
        score_S1.data_ptr(),
        hidden_SH.data_ptr(),
        work_B.data_ptr(),
    )


def copy_rows(
    pool_LRKD: Tensor, source_T: Tensor, destination_T: Tensor, *, trash_row: int
) -> None:
    """pool[:, destination] = pool[:, source], but for the trash row; of any dtype, contiguous."""
    num_layers = len(pool_LRKD)
    layer_bytes = pool_LRKD.stride(0) * pool_LRKD.itemsize
    row_bytes = pool_LRKD.stride(1) * pool_LRKD.itemsize
    _entry("copy_rows")(
        pool_LRKD.data_ptr(),
        num_layers,
        layer_bytes,
        row_bytes,
        source_T.data_ptr(),
        destination_T.data_ptr(),
        len(source_T),
        trash_row,
    )


def keep_hidden(
    hidden_TH: Tensor,
    *,
    page_T: Tensor,
    page_end_PH: Tensor,
    slots_B: Tensor,
    last_B: Tensor,
    moved_B: Tensor,
    kept_SH: Tensor,
) -> Tensor:
    """Rows to the pages that they end, each slot's last to the slot if it moved; the slots' [B, H].

    All of one dtype and contiguous.
    """
    out_BH = hidden_TH.new_empty(len(slots_B), hidden_TH.shape[1])
    _entry("keep_hidden")(
        hidden_TH.data_ptr(),
        _row_bytes(hidden_TH),
        len(hidden_TH),
        page_T.data_ptr(),
        page_end_PH.data_ptr(),
        slots_B.data_ptr(),
        last_B.data_ptr(),
        moved_B.data_ptr(),
        len(slots_B),
        kept_SH.data_ptr(),
        out_BH.data_ptr(),
    )
    return out_BH


def _row_bytes(x: Tensor) -> int:
    return x.stride(0) * x.itemsize
