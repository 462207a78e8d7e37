"""The steps of a round in torch operations: the reference, and the path of CPUs.

With L committed tokens, the pending token x_L has neither target keys nor a row in the pages yet.
A tree node of depth d is verified at position L + d; its token was chosen with the noise of
position L + d, and the target's choice at the node uses that of position L + d + 1 (D9).

Shape suffixes as in `steps`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eyas import kernels
from eyas.config import TreeShape
from eyas.contract.draft import DraftOutput
from eyas.contract.target import LocalLogits
from eyas.kernels import SamplingMode
from eyas.speculative.backend import Backend
from eyas.speculative.sampler import Sampler
from eyas.speculative.simulate import SimulatedAcceptance
from eyas.speculative.state import SlotState
from eyas.speculative.steps import (
    Entries,
    LastPairs,
    RoundStart,
    Settled,
    gather_pairs,
    place_entries,
)
from eyas.speculative.tree import Tree, TreeBuilder, chain_tree

if TYPE_CHECKING:
    from eyas.speculative.proposer import Proposer


class TorchGrowth:
    """Implements steps.Growth with a TreeBuilder."""

    def __init__(
        self,
        state: SlotState,
        start: RoundStart,
        shape: TreeShape,
        *,
        mode: SamplingMode,
        proposer: Proposer,
    ) -> None:
        self._shape, self._mode, self._proposer, self._level = shape, mode, proposer, 1
        slots_B, topk = start.slots_B, shape.topk
        self._length_B = start.length_B
        self._builder = TreeBuilder(
            shape,
            state.candidate_token_SK[slots_B, :topk],
            state.candidate_score_SK[slots_B, :topk],
        )
        hidden_BKH = state.draft_hidden_SH.index_select(0, slots_B)[:, None].expand(-1, topk, -1)
        self.hidden_TH = hidden_BKH.flatten(0, 1)
        self._chain = [state.pending_S.index_select(0, slots_B), self._builder.token_BK[:, 0]]
        self.slots_T = slots_B[:, None].expand(-1, topk).reshape(-1)
        self.end_B = self._length_B + 1
        self._take_level()

    def _take_level(self) -> None:
        # A candidate of depth d is consumed at position L + d - 1.
        position_B = self._length_B + self._level - 1
        self.position_T = position_B[:, None].expand(-1, self._shape.topk).reshape(-1)
        self.token_T = self._builder.token_BK.reshape(-1)

    def visible_rows(self) -> Tensor:
        """As Growth."""
        return self._builder.visible_rows()

    def advance(self, output: DraftOutput) -> None:
        """As Growth."""
        topk = self._shape.topk
        token_TK, score_TK = self._proposer.propose(
            output.logits, self.slots_T, self.position_T + 2, topk=topk, mode=self._mode
        )
        hidden_BKH = self._builder.advance(
            token_TK.view(-1, topk, topk),
            score_TK.view(-1, topk, topk),
            output.hidden_TH.view(len(self._length_B), topk, -1),
        )
        self.hidden_TH = hidden_BKH.flatten(0, 1)
        self._chain.append(self._builder.token_BK[:, 0])
        self._level += 1
        self._take_level()

    def finish(self) -> Tree:
        """As Growth."""
        if self._shape.is_chain:
            return chain_tree(torch.stack(self._chain, dim=1))
        return self._builder.finish(self._chain[0])


class TorchSteps:
    """Implements steps.Steps."""

    def __init__(self, state: SlotState) -> None:
        self.state, self.sampler = state, Sampler(state)

    def begin(self, slots_B: Tensor, shape: TreeShape) -> RoundStart:
        """As Steps."""
        return RoundStart(
            slots_B,
            self.state.length_S.index_select(0, slots_B),
            self.state.page_table_SP.index_select(0, slots_B),
        )

    def root(self, start: RoundStart) -> Tree:
        """As Steps."""
        return chain_tree(self.state.pending_S.index_select(0, start.slots_B)[:, None])

    def grow(
        self, start: RoundStart, shape: TreeShape, *, mode: SamplingMode, proposer: Proposer
    ) -> TorchGrowth:
        """As Steps."""
        return TorchGrowth(self.state, start, shape, mode=mode, proposer=proposer)

    def choose(
        self,
        logits: LocalLogits,
        slots_B: Tensor,
        position_T: Tensor,
        tree: Tree,
        mode: SamplingMode,
    ) -> Tensor:
        """As Steps."""
        num_nodes = tree.token_BN.shape[1]
        slots_T = slots_B[:, None].expand(-1, num_nodes).reshape(-1)
        return self.sampler.choose_of(logits, slots_T, position_T + 1, mode=mode, tree=tree)

    def choose_first(
        self, logits: LocalLogits, slots_B: Tensor, end_B: Tensor, mode: SamplingMode
    ) -> Tensor:
        """As Steps."""
        return self.sampler.choose_of(logits, slots_B, end_B, mode=mode)

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
        """As Steps."""
        slots_B, length_B = start.slots_B, start.length_B
        path_BE, emitted_BE, num_accepted_B = self._accept(
            slots_B, tree, chosen_T, shape=shape, simulated=simulated
        )
        num_emitted_B, finish_B = self.sampler.emit(slots_B, emitted_BE, num_accepted_B, mode=mode)
        self._move(slots_B, length_B, emitted_BE, num_emitted_B)
        pool, num_steps = backend.pool, shape.depth + 1
        step_E = torch.arange(num_steps, device=path_BE.device)
        valid_BE = step_E < num_emitted_B[:, None]
        index_BE = torch.where(valid_BE, length_B[:, None] + step_E, 0)
        row_BE = self.state.rows(slots_B[:, None], index_BE, pool.page_size)
        row_BE = torch.where(valid_BE, row_BE, pool.trash_row)
        first_B = torch.arange(len(slots_B), device=path_BE.device)
        scratch_B1 = backend.scratch_rows(slots_B, step_E[:1])
        extra = torch.stack((num_emitted_B, finish_B, num_accepted_B), dim=1)
        return Settled(
            packed=torch.cat((emitted_BE, extra), dim=1),
            emitted_BE=emitted_BE,
            row_T=(first_B[:, None] * shape.num_nodes + path_BE).reshape(-1),
            source_T=(scratch_B1 + path_BE).reshape(-1),
            destination_T=row_BE.reshape(-1),
            # The draft's entries of the committed path: pairs (emitted j, features of node j).
            entries=place_entries(
                self.state,
                pool,
                (length_B[:, None] + step_E).reshape(-1),
                slots_T=slots_B[:, None].expand(-1, num_steps).reshape(-1),
                valid_T=valid_BE.reshape(-1),
                slots_B=slots_B,
                last_B=first_B * num_steps + (num_emitted_B - 1).clamp(min=0),
            ),
        )

    def _accept(
        self,
        slots_B: Tensor,
        tree: Tree,
        chosen_T: Tensor,
        *,
        shape: TreeShape,
        simulated: SimulatedAcceptance | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(path_BE, emitted_BE, num_accepted_B); a slot's limit of drafted tokens cuts the walk:
        the choice at the last node kept is then the bonus token, as at any other node."""
        chosen_BN = chosen_T.view(-1, shape.num_nodes)
        if simulated is not None and shape.depth:
            accepted = simulated.accept(self.state, slots_B, tree, chosen_BN, depth=shape.depth)
        else:
            accepted = kernels.walk_tree(
                tree.token_BN, tree.parent_BN, chosen_BN, depth=shape.depth
            )
        path_BE, emitted_BE, num_accepted_B = accepted
        max_draft_B = self.state.max_draft_S.index_select(0, slots_B)
        return path_BE, emitted_BE, torch.minimum(num_accepted_B, max_draft_B)

    def _move(
        self, slots_B: Tensor, length_B: Tensor, emitted_BE: Tensor, num_emitted_B: Tensor
    ) -> None:
        """Move length and pending token."""
        state = self.state
        last_B1 = (num_emitted_B - 1).clamp(min=0)[:, None]
        pending_B = emitted_BE.gather(1, last_B1)[:, 0]
        state.length_S.index_copy_(0, slots_B, length_B + num_emitted_B)
        kept_B = state.pending_S.index_select(0, slots_B)
        pending_B = torch.where(num_emitted_B > 0, pending_B, kept_B)
        state.pending_S.index_copy_(0, slots_B, pending_B)

    def features(self, features_TF: Tensor, settled: Settled, shape: TreeShape) -> Tensor:
        """As Steps."""
        return features_TF.index_select(0, settled.row_T)

    def keep(self, hidden_TH: Tensor, entries: Entries, page_end_PH: Tensor) -> Tensor:
        """As Steps."""
        state, slots_B, last_B = self.state, entries.slots_B, entries.last_B
        page_end_PH.index_copy_(0, entries.page_T, hidden_TH)
        kept_BH = state.draft_input_SH.index_select(0, slots_B)
        moved_B1 = (entries.moved_B != 0)[:, None]
        moved_BH = torch.where(moved_B1, hidden_TH.index_select(0, last_B), kept_BH)
        state.draft_input_SH.index_copy_(0, slots_B, moved_BH)
        return moved_BH

    def last_pairs(self, start: RoundStart, settled: Settled, hidden_BH: Tensor) -> LastPairs:
        """As Steps."""
        return gather_pairs(self.state, start.slots_B, start.page_table_BP)

    def first_level(
        self, output: DraftOutput, pairs: LastPairs, *, mode: SamplingMode, proposer: Proposer
    ) -> None:
        """As Steps."""
        state, slots_B = self.state, pairs.slots_B
        topk = state.candidate_token_SK.shape[1]
        token_BK, score_BK = proposer.propose(
            output.logits, slots_B, pairs.length_B + 1, topk=topk, mode=mode
        )
        state.draft_hidden_SH.index_copy_(0, slots_B, output.hidden_TH)
        state.candidate_token_SK.index_copy_(0, slots_B, token_BK)
        state.candidate_score_SK.index_copy_(0, slots_B, score_BK)
