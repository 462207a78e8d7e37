"""The steps of a round between the models' forwards, as an interface with three implementations.

`torch_steps` is what a round means, in torch operations on any device; `triton_steps` does the same
in a launch or two a step on a GPU, `native_steps` in a call of C on a CPU. `round` and `proposer`
put the steps together.

Shape suffixes: B requests, K topk, N tree nodes, E = depth + 1 emitted at most, T rows,
V vocabulary, H draft hidden, P pages.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from eyas import kernels
from eyas.cache.pool import TRASH_PAGE
from eyas.config import TreeShape
from eyas.contract.draft import DraftOutput
from eyas.contract.target import LocalLogits
from eyas.kernels import SamplingMode
from eyas.speculative.backend import Backend, Pool
from eyas.speculative.sampler import Sampler
from eyas.speculative.simulate import SimulatedAcceptance
from eyas.speculative.state import SlotState
from eyas.speculative.tree import Tree

if TYPE_CHECKING:
    from eyas.speculative.proposer import Proposer


@dataclasses.dataclass(frozen=True)
class RoundStart:
    """Where a round's slots stand before it. length_B: int64; page_table_BP: their page tables."""

    slots_B: Tensor
    length_B: Tensor
    page_table_BP: Tensor


class Growth(Protocol):
    """A batch of trees being drafted: the B * K rows of the next level, and what comes of them."""

    @property
    def token_T(self) -> Tensor:
        """The beams' tokens."""

    @property
    def position_T(self) -> Tensor:
        """Their rows' positions."""

    @property
    def slots_T(self) -> Tensor:
        """The slot of each row."""

    @property
    def hidden_TH(self) -> Tensor:
        """The hidden states that the rows read."""

    @property
    def end_B(self) -> Tensor:
        """The index after the last that they see of the pages."""

    def visible_rows(self) -> Tensor:
        """bool [B, K, draft rows so far]: those each beam attends to, its own included."""

    def advance(self, output: DraftOutput) -> None:
        """Take the draft's answer for a level and move to the next."""

    def finish(self) -> Tree:
        """The trees that are verified."""


@dataclasses.dataclass(frozen=True)
class Entries:
    """The draft's entries of some rows: pairs (a token, features of position_T).

    row_T: pool rows of their keys, the trash row for rows that do not count. page_T: the page that
    an entry ends, or the trash page. last_B: the last row that counts of each slot in slots_B, if
    moved_B is not 0. rows_a_slot: how many rows each slot has, in order; None where they differ.
    """

    position_T: Tensor
    row_T: Tensor
    page_T: Tensor
    slots_B: Tensor
    last_B: Tensor
    moved_B: Tensor
    rows_a_slot: int | None = None


@dataclasses.dataclass(frozen=True)
class LastPairs:
    """Each slot's last pair, the row that `Proposer.prime` runs: (pending token, s of the last
    committed token) at position_B; length_B tokens are committed. own_B11: bool, all True: the
    row sees itself."""

    slots_B: Tensor
    token_B: Tensor
    hidden_BH: Tensor
    position_B: Tensor
    length_B: Tensor
    page_table_BP: Tensor
    own_B11: Tensor


@dataclasses.dataclass(frozen=True)
class Settled:
    """What a round has come to. packed: as RoundOutput; emitted_BE int64. row_T: the rows of the
    verification along the path, [B * E]. source_T, destination_T: pool rows to copy, where the
    destination of rows that do not count is the trash row."""

    packed: Tensor
    emitted_BE: Tensor
    row_T: Tensor
    source_T: Tensor
    destination_T: Tensor
    entries: Entries


class Steps(Protocol):
    """The steps of a round, in order. All tensors stay on the device. sampler: what chooses and
    emits in torch operations."""

    sampler: Sampler

    def begin(self, slots_B: Tensor, shape: TreeShape) -> RoundStart:
        """Gather what the slots know."""

    def root(self, start: RoundStart) -> Tree:
        """The trees of a plain round: the pending tokens alone."""

    def grow(
        self, start: RoundStart, shape: TreeShape, *, mode: SamplingMode, proposer: Proposer
    ) -> Growth:
        """Trees of at least one level, from the first-level candidates."""

    def choose(
        self,
        logits: LocalLogits,
        slots_B: Tensor,
        position_T: Tensor,
        tree: Tree,
        mode: SamplingMode,
    ) -> Tensor:
        """The target's token at each node, int64 [B * N]; position_T: the nodes' own."""

    def choose_first(
        self, logits: LocalLogits, slots_B: Tensor, end_B: Tensor, mode: SamplingMode
    ) -> Tensor:
        """The token after each prompt, int64 [B], of position end_B."""

    def settle(
        self,
        start: RoundStart,
        tree: Tree,
        chosen_T: Tensor,
        *,
        shape: TreeShape,
        backend: Backend,
        mode: SamplingMode,
        simulated: SimulatedAcceptance | None,
    ) -> Settled:
        """Accept, emit, and move the slots to where the next round starts."""

    def features(self, features_TF: Tensor, settled: Settled, shape: TreeShape) -> Tensor:
        """The features of the path's nodes, [B * E, F]; of rows that do not count, any."""

    def keep(self, hidden_TH: Tensor, entries: Entries, page_end_PH: Tensor) -> Tensor:
        """Keep s of what ends a page and of each slot's last row; returns the slots' s [B, H]."""

    def last_pairs(self, start: RoundStart, settled: Settled, hidden_BH: Tensor) -> LastPairs:
        """What `prime` runs after a round; hidden_BH: of `keep`."""

    def first_level(
        self, output: DraftOutput, pairs: LastPairs, *, mode: SamplingMode, proposer: Proposer
    ) -> None:
        """Store the slots' first-level candidates and the hidden state that they come from."""


def steps_for(state: SlotState) -> Steps:
    """The implementation for a device: Triton's on a GPU that has it, on a CPU the one in C."""
    if kernels.has_triton(state.device):
        from eyas.speculative.triton_steps import TritonSteps

        return TritonSteps(state)
    if kernels.has_native(state.device):
        from eyas.speculative.native_steps import NativeSteps

        return NativeSteps(state)
    from eyas.speculative.torch_steps import TorchSteps

    return TorchSteps(state)


def gather_pairs(state: SlotState, slots_B: Tensor, page_table_BP: Tensor) -> LastPairs:
    """The last pairs, from the slots themselves."""
    length_B = state.length_S.index_select(0, slots_B)
    return LastPairs(
        slots_B=slots_B,
        token_B=state.pending_S.index_select(0, slots_B),
        hidden_BH=state.draft_input_SH.index_select(0, slots_B),
        position_B=(length_B - 1).clamp(min=0),
        length_B=length_B,
        page_table_BP=page_table_BP,
        own_B11=torch.ones(len(slots_B), 1, 1, dtype=torch.bool, device=slots_B.device),
    )


def place_entries(
    state: SlotState,
    pool: Pool,
    position_T: Tensor,
    *,
    slots_T: Tensor,
    valid_T: Tensor,
    slots_B: Tensor,
    last_B: Tensor,
) -> Entries:
    """Where the entries of rows go: the index of a pair at position t is t + 1 (D7)."""
    size = pool.page_size
    index_T = torch.where(valid_T, position_T + 1, 0)
    row_T = state.rows(slots_T, index_T, size)
    ends_page_T = valid_T & (index_T % size == 0)
    page_T = state.pages(slots_T, (index_T - 1).clamp(min=0), size)
    return Entries(
        position_T=position_T,
        row_T=torch.where(valid_T, row_T, pool.trash_row),
        page_T=torch.where(ends_page_T, page_T, TRASH_PAGE),
        slots_B=slots_B,
        last_B=last_B,
        moved_B=valid_T.index_select(0, last_B),
    )
