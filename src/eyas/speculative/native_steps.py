"""The steps of a round in C, for few requests on a CPU: a call a step where torch needs ten.

Greedy chains, and what is common to all rounds. Trees are drafted, and requests that sample or have
penalties choose, as in `torch_steps`.

Shape suffixes as in `steps`.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eyas import kernels
from eyas.cache.pool import TRASH_PAGE
from eyas.config import TreeShape
from eyas.contract.draft import DraftOutput
from eyas.contract.target import LocalLogits
from eyas.kernels import SamplingMode, native, native_round
from eyas.speculative.backend import Backend
from eyas.speculative.simulate import SimulatedAcceptance
from eyas.speculative.state import SlotState
from eyas.speculative.steps import Entries, Growth, LastPairs, RoundStart, Settled
from eyas.speculative.torch_steps import TorchSteps
from eyas.speculative.tree import PlacedTree, Tree

if TYPE_CHECKING:
    from eyas.speculative.proposer import Proposer


@dataclasses.dataclass(frozen=True)
class BegunRound(RoundStart):
    """With all that was gathered, and the kernels that know the slots."""

    begun: native_round.Begun
    slots: native_round.RoundKernels


@dataclasses.dataclass(frozen=True)
class SettledRound(Settled):
    """With the state after the round."""

    outcome: native_round.Outcome


def placed(start: BegunRound, token_BN: Tensor) -> PlacedTree:
    """The chain of these tokens."""
    shape = native_round.chain_shape(*token_BN.shape)
    return PlacedTree(token_BN, *shape, start.begun.position_BN)


class ChainGrowth:
    """Implements steps.Growth for greedy chains."""

    def __init__(self, steps: NativeSteps, start: BegunRound, proposer: Proposer) -> None:
        self._steps, self._start, self._proposer, self._level = steps, start, proposer, 1
        self.slots_T, self.end_B = start.slots_B, start.begun.draft_end_B
        self._token_BN, self.token_T, self.hidden_TH = steps.chain_tokens(start)

    @property
    def position_T(self) -> Tensor:
        """As Growth."""
        return self._start.begun.draft_position_DB[self._level - 1]

    def visible_rows(self) -> Tensor:
        """As Growth."""
        return torch.ones(len(self.end_B), 1, self._level, dtype=torch.bool)

    def advance(self, output: DraftOutput) -> None:
        """As Growth."""
        self._level += 1
        proposer = self._proposer
        if output.part is None and native.accepts(output.logits_TV):
            self.token_T = native_round.best_tokens(
                output.logits_TV.contiguous(),
                proposer.draft.target_ids_V,
                into=(self._token_BN, self._level),
            )
        else:  # fp64, or logits that ranks share
            token_T1, _ = proposer.propose(
                output.logits, self.slots_T, self.end_B, topk=1, mode=SamplingMode()
            )
            self.token_T = token_T1[:, 0]
            self._token_BN[:, self._level] = self.token_T
        self.hidden_TH = output.hidden_TH

    def finish(self) -> Tree:
        """As Growth."""
        return placed(self._start, self._token_BN)


class NativeSteps:
    """Implements steps.Steps. What it does not do itself is TorchSteps'."""

    def __init__(self, state: SlotState) -> None:
        self.state, self._torch = state, TorchSteps(state)
        self.sampler = self._torch.sampler
        self._known: tuple[Tensor, ...] = ()
        self._slots: native_round.RoundKernels | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy looks at its own tensors."""
        return vars(self) | {"_known": (), "_slots": None}

    def _kernels(self) -> native_round.RoundKernels | None:
        """Of the state's tensors as they are now; None where torch must take them."""
        state = self.state
        tensors = (
            state.length_S,
            state.pending_S,
            state.remaining_S,
            state.emitted_S,
            state.active_S,
            state.max_draft_S,
            state.stop_ids_SM,
            state.page_table_SP,
        )
        if self._known != () and all(map(operator.is_, tensors, self._known)):
            return self._slots
        fits = all(t.is_cpu and t.is_contiguous() for t in tensors)
        self._known, self._slots = tensors, None
        if fits:
            self._slots = native_round.RoundKernels(native_round.SlotTensors(*tensors))
        return self._slots

    def begin(self, slots_B: Tensor, shape: TreeShape) -> RoundStart:
        """As Steps."""
        slots = self._kernels() if native.accepts_indices(slots_B) else None
        if slots is None:
            return self._torch.begin(slots_B, shape)
        slots_B = slots_B.contiguous()
        begun = slots.begin(slots_B, shape.depth + 1)
        return BegunRound(slots_B, begun.length_B, begun.page_table_BP, begun, slots)

    def root(self, start: RoundStart) -> Tree:
        """As Steps."""
        if not isinstance(start, BegunRound):
            return self._torch.root(start)
        return placed(start, self.chain_tokens(start)[0])

    def chain_tokens(self, start: BegunRound) -> tuple[Tensor, Tensor, Tensor]:
        """A chain's first tokens, as RoundKernels.chain."""
        state = self.state
        return start.slots.chain(
            start.slots_B,
            start.begun.position_BN.shape[1],
            candidate_SK=state.candidate_token_SK,
            hidden_SH=state.draft_hidden_SH,
        )

    def grow(
        self, start: RoundStart, shape: TreeShape, *, mode: SamplingMode, proposer: Proposer
    ) -> Growth:
        """As Steps."""
        if shape.is_chain and not mode.noise and isinstance(start, BegunRound):
            return ChainGrowth(self, start, proposer)
        return self._torch.grow(start, shape, mode=mode, proposer=proposer)

    def choose(
        self,
        logits: LocalLogits,
        slots_B: Tensor,
        position_T: Tensor,
        tree: Tree,
        mode: SamplingMode,
    ) -> Tensor:
        """As Steps."""
        if logits.part is not None or mode.noise or mode.penalize or mode.bias or mode.truncate:
            return self._torch.choose(logits, slots_B, position_T, tree, mode)
        return kernels.choose_tokens(logits.logits_TV, self.state.temperature_S, None)

    def choose_first(
        self, logits: LocalLogits, slots_B: Tensor, end_B: Tensor, mode: SamplingMode
    ) -> Tensor:
        """As Steps."""
        return self._torch.choose_first(logits, slots_B, end_B, mode)

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
        is_simulated = simulated is not None and shape.depth > 0
        if mode.penalize or is_simulated or not isinstance(start, BegunRound):
            return self._torch.settle(
                start,
                tree,
                chosen_T,
                shape=shape,
                backend=backend,
                mode=mode,
                simulated=simulated,
            )
        pool, slots_B = backend.pool, start.slots_B
        outcome = start.slots.settle(
            slots_B,
            tree.token_BN,
            tree.parent_BN,
            chosen_T.contiguous(),
            num_steps=shape.depth + 1,
            places=(
                pool.page_size,
                pool.trash_row,
                TRASH_PAGE,
                pool.num_page_rows,
                pool.num_scratch_rows,
            ),
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
                moved_B=outcome.moved_B,
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
        is_settled = entries.rows_a_slot is not None
        if not is_settled or not native.accepts_indices(entries.page_T):
            return self._torch.keep(hidden_TH, entries, page_end_PH)
        return native_round.keep_hidden(
            hidden_TH.to(page_end_PH.dtype).contiguous(),
            page_T=entries.page_T,
            page_end_PH=page_end_PH,
            slots_B=entries.slots_B,
            last_B=entries.last_B,
            moved_B=entries.moved_B,
            kept_SH=self.state.draft_input_SH,
        )

    def last_pairs(self, start: RoundStart, settled: Settled, hidden_BH: Tensor) -> LastPairs:
        """As Steps."""
        if not isinstance(settled, SettledRound):
            return self._torch.last_pairs(start, settled, hidden_BH)
        outcome = settled.outcome
        return LastPairs(
            slots_B=start.slots_B,
            token_B=outcome.pending_B,
            hidden_BH=hidden_BH,
            position_B=outcome.last_position_B,
            length_B=outcome.length_B,
            page_table_BP=start.page_table_BP,
            own_B11=torch.ones(len(start.slots_B), 1, 1, dtype=torch.bool),
        )

    def first_level(
        self, output: DraftOutput, pairs: LastPairs, *, mode: SamplingMode, proposer: Proposer
    ) -> None:
        """As Steps."""
        state, logits_TV = self.state, output.logits_TV
        hidden_SH = state.draft_hidden_SH
        same = output.hidden_TH.dtype is hidden_SH.dtype
        is_single = state.candidate_token_SK.shape[1] == 1
        is_whole = output.part is None and native.accepts(logits_TV)
        if mode.noise or not is_single or not same or not is_whole:
            self._torch.first_level(output, pairs, mode=mode, proposer=proposer)
            return
        native_round.store_first_level(
            logits_TV.contiguous(),
            proposer.draft.target_ids_V,
            pairs.slots_B.contiguous(),
            output.hidden_TH.contiguous(),
            candidate_S1=state.candidate_token_SK,
            score_S1=state.candidate_score_SK,
            hidden_SH=hidden_SH,
        )
