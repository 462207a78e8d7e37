"""The steps of a round in Triton: a launch or two each, so that a captured round is all models.

Log-probabilities stay torch operations, as does what the kernels do not serve: logits in fp64, and
more than MAX_TOPK candidates.

Shape suffixes as in `steps`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eyas.cache.pool import TRASH_PAGE
from eyas.config import TreeShape
from eyas.contract.draft import DraftOutput
from eyas.contract.target import LocalLogits
from eyas.kernels import (
    SamplingMode,
    triton_draft,
    triton_process,
    triton_round,
    triton_sampling,
    triton_settle,
    triton_truncate,
)
from eyas.speculative.backend import Backend
from eyas.speculative.simulate import SimulatedAcceptance
from eyas.speculative.state import SlotState
from eyas.speculative.steps import Entries, Growth, LastPairs, RoundStart, Settled
from eyas.speculative.torch_steps import TorchSteps
from eyas.speculative.tree import PlacedTree, Tree, chain_tree
from eyas.speculative.triton_growth import ChainGrowth, GatheredStart, TreeGrowth

if TYPE_CHECKING:
    from eyas.speculative.proposer import Proposer


@dataclasses.dataclass(frozen=True)
class SettledRound(Settled):
    """With the state after the round."""

    outcome: triton_settle.Outcome


class TritonSteps:
    """Implements steps.Steps. What it does not do itself is TorchSteps'."""

    def __init__(self, state: SlotState) -> None:
        self.state, self._torch = state, TorchSteps(state)
        self.sampler = self._torch.sampler
        self._constants: dict[tuple[str, int, int, int], Tensor] = {}

    def begin(self, slots_B: Tensor, shape: TreeShape) -> GatheredStart:
        """As Steps."""
        state = self.state
        gathered = triton_round.begin(
            slots_B,
            length_S=state.length_S,
            pending_S=state.pending_S,
            page_table_SP=state.page_table_SP,
            candidate_token_SK=state.candidate_token_SK,
            candidate_score_SK=state.candidate_score_SK,
            draft_hidden_SH=state.draft_hidden_SH,
            depth=shape.depth,
            topk=shape.topk,
            num_nodes=shape.num_nodes,
        )
        return GatheredStart(slots_B, gathered["length_B"], gathered["page_table_BP"], gathered)

    def root(self, start: RoundStart) -> Tree:
        """As Steps."""
        assert isinstance(start, GatheredStart)
        return self.chain(start)

    def grow(
        self, start: RoundStart, shape: TreeShape, *, mode: SamplingMode, proposer: Proposer
    ) -> Growth:
        """As Steps."""
        assert isinstance(start, GatheredStart)
        if shape.is_chain:
            return ChainGrowth(self, start, mode=mode, proposer=proposer)
        if shape.topk > triton_draft.MAX_TOPK:
            return self._torch.grow(start, shape, mode=mode, proposer=proposer)
        return TreeGrowth(self, start, shape, mode=mode, proposer=proposer)

    def chain(self, start: GatheredStart) -> Tree:
        """The chain whose tokens have been drafted into the start's table."""
        token_BN = start.gathered["token_BN"]
        num_requests, num_nodes = token_BN.shape
        sizes = (num_requests, num_nodes, 0)
        parent_BN, depth_BN, visible_BNN = (
            self._constant(name, sizes, functools.partial(_chain_constant, name, token_BN))
            for name in ("parent", "depth", "visible")
        )
        return PlacedTree(token_BN, parent_BN, depth_BN, visible_BNN, start.gathered["position_BN"])

    def ones(self, *sizes: int) -> Tensor:
        """bool, all True."""
        assert len(sizes) == 3
        device = self.state.device
        return self._constant(
            "ones", sizes, lambda: torch.ones(sizes, dtype=torch.bool, device=device)
        )

    def eye(self, num_requests: int, size: int) -> Tensor:
        """bool [B, size, size]: each row itself."""

        def make() -> Tensor:
            one = torch.eye(size, dtype=torch.bool, device=self.state.device)
            return one.expand(num_requests, -1, -1).contiguous()

        return self._constant("eye", (num_requests, size, size), make)

    def propose(
        self,
        output: DraftOutput,
        slots_T: Tensor,
        position_T: Tensor,
        *,
        topk: int,
        mode: SamplingMode,
        proposer: Proposer,
    ) -> triton_draft.Proposals:
        """The draft's best candidates of rows at positions."""
        return triton_draft.propose(
            output.logits_TV,
            slots_T,
            position_T,
            proposer.draft.target_ids_V,
            part=output.part,
            temperature_S=self.state.temperature_S,
            seed_S=self.state.seed_S,
            topk=topk,
            noise=mode.noise,
        )

    def choose(
        self,
        logits: LocalLogits,
        slots_B: Tensor,
        position_T: Tensor,
        tree: Tree,
        mode: SamplingMode,
    ) -> Tensor:
        """As Steps."""
        if logits.logits_TV.dtype not in triton_sampling.FLOATS:
            return self._torch.choose(logits, slots_B, position_T, tree, mode)
        return self._choose(logits, slots_B, position_T, offset=1, mode=mode, tree=tree)

    def choose_first(
        self, logits: LocalLogits, slots_B: Tensor, end_B: Tensor, mode: SamplingMode
    ) -> Tensor:
        """As Steps."""
        if logits.logits_TV.dtype not in triton_sampling.FLOATS:
            return self._torch.choose_first(logits, slots_B, end_B, mode)
        return self._choose(logits, slots_B, end_B, offset=0, mode=mode, tree=None)

    def _choose(
        self,
        logits: LocalLogits,
        slots_B: Tensor,
        position_T: Tensor,
        *,
        offset: int,
        mode: SamplingMode,
        tree: Tree | None,
    ) -> Tensor:
        state, logits_TV, part, bounds = self.state, logits.logits_TV, logits.part, None
        if mode.penalize or mode.bias or mode.truncate:  # these need every id's logit
            logits_TV, part = logits.whole_TV, None
        if mode.penalize or mode.bias:
            nodes = None if tree is None else (tree.token_BN, tree.depth_BN, tree.visible_BNN)
            logits_TV = triton_process.process(
                triton_process.ProcessorTensors.of(state),
                logits_TV,
                slots_B,
                penalize=mode.penalize,
                bias=mode.bias,
                tree=nodes,
            )
        if mode.truncate:
            bounds = triton_truncate.truncation_bounds(
                logits_TV,
                slots_B,
                temperature_S=state.temperature_S,
                top_k_S=state.top_k_S,
                top_p_S=state.top_p_S,
            )
        return triton_sampling.choose(
            logits_TV,
            slots_B,
            position_T,
            part=part,
            offset=offset,
            temperature_S=state.temperature_S,
            seed_S=state.seed_S,
            min_p_S=state.min_p_S,
            noise=mode.noise,
            bounds=bounds,
        )

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
        slots_B, pool = start.slots_B, backend.pool
        outcome = triton_settle.settle(
            triton_settle.SlotTensors.of(self.state),
            triton_settle.Places(
                page_size=pool.page_size,
                trash_row=pool.trash_row,
                trash_page=TRASH_PAGE,
                first_scratch=pool.num_page_rows,
                num_scratch=pool.num_scratch_rows,
            ),
            slots_B,
            tree.token_BN,
            tree.parent_BN,
            chosen_T,
            depth=shape.depth,
            count=mode.penalize,
            rate_D=None if simulated is None or not shape.depth else simulated.rate_D,
        )
        return SettledRound(
            packed=outcome.packed,
            emitted_BE=outcome.emitted_T.view(len(slots_B), -1),
            row_T=outcome.row_T,
            source_T=outcome.source_T,
            destination_T=outcome.destination_T,
            entries=Entries(
                position_T=outcome.position_T,
                row_T=outcome.entry_row_T,
                page_T=outcome.page_T,
                slots_B=slots_B,
                last_B=outcome.last_B,
                moved_B=outcome.num_emitted_B,
                rows_a_slot=shape.depth + 1,
            ),
            outcome=outcome,
        )

    def features(self, features_TF: Tensor, settled: Settled, shape: TreeShape) -> Tensor:
        """As Steps. A chain's path is its nodes in order, as far as it counts."""
        if shape.is_chain:
            return features_TF
        return self._torch.features(features_TF, settled, shape)

    def keep(self, hidden_TH: Tensor, entries: Entries, page_end_PH: Tensor) -> Tensor:
        """As Steps."""
        if entries.rows_a_slot is None:
            return self._torch.keep(hidden_TH, entries, page_end_PH)
        return triton_round.keep_hidden(
            hidden_TH,
            slots_B=entries.slots_B,
            page_T=entries.page_T,
            last_B=entries.last_B,
            moved_B=entries.moved_B,
            page_end_PH=page_end_PH,
            draft_input_SH=self.state.draft_input_SH,
            trash_page=TRASH_PAGE,
        )

    def last_pairs(self, start: RoundStart, settled: Settled, hidden_BH: Tensor) -> LastPairs:
        """As Steps."""
        assert isinstance(settled, SettledRound)
        outcome = settled.outcome
        return LastPairs(
            slots_B=start.slots_B,
            token_B=outcome.pending_B,
            hidden_BH=hidden_BH,
            position_B=outcome.last_position_B,
            length_B=outcome.length_B,
            page_table_BP=start.page_table_BP,
            own_B11=self.ones(len(start.slots_B), 1, 1),
        )

    def first_level(
        self, output: DraftOutput, pairs: LastPairs, *, mode: SamplingMode, proposer: Proposer
    ) -> None:
        """As Steps."""
        state, topk = self.state, self.state.candidate_token_SK.shape[1]
        if topk > triton_draft.MAX_TOPK:
            self._torch.first_level(output, pairs, mode=mode, proposer=proposer)
            return
        proposals = self.propose(
            output, pairs.slots_B, pairs.position_B, topk=topk, mode=mode, proposer=proposer
        )
        triton_draft.store_first_level(
            proposals,
            pairs.slots_B,
            proposer.draft.target_ids_V,
            output.hidden_TH,
            candidate_token_SK=state.candidate_token_SK,
            candidate_score_SK=state.candidate_score_SK,
            draft_hidden_SH=state.draft_hidden_SH,
        )

    def _constant(
        self, name: str, sizes: tuple[int, int, int], make: Callable[[], Tensor]
    ) -> Tensor:
        """A tensor that never changes. One that is made while a graph is captured belongs to the
        graph, and is not kept for others."""
        found = self._constants.get((name, *sizes))
        if found is None:
            found = make()
            if not (found.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._constants[name, *sizes] = found
        return found


def _chain_constant(name: str, token_BN: Tensor) -> Tensor:
    whole = chain_tree(token_BN)
    tensors = {
        "parent": whole.parent_BN,
        "depth": whole.depth_BN,
        "visible": whole.visible_BNN,
    }
    return tensors[name].contiguous()
