"""Trees being drafted, in Triton: a launch for what the draft proposes and one for what it makes.

Shape suffixes as in `steps`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import Tensor

from eyas.config import TreeShape
from eyas.contract.draft import DraftOutput
from eyas.kernels import SamplingMode, triton_draft
from eyas.kernels import triton_tree as trees
from eyas.speculative.steps import RoundStart
from eyas.speculative.tree import PlacedTree, Tree

if TYPE_CHECKING:
    from eyas.speculative.proposer import Proposer
    from eyas.speculative.triton_steps import TritonSteps


@dataclasses.dataclass(frozen=True)
class GatheredStart(RoundStart):
    """A start with all that its kernel gathered, by name."""

    gathered: dict[str, Tensor]


class ChainGrowth:
    """Implements steps.Growth for one candidate a level."""

    def __init__(
        self, steps: TritonSteps, start: GatheredStart, *, mode: SamplingMode, proposer: Proposer
    ) -> None:
        self._steps, self._mode, self._proposer = steps, mode, proposer
        self._start, self._level = start, 1
        gathered = start.gathered
        self.token_T, self.slots_T = gathered["token_T"], gathered["slots_T"]
        self.hidden_TH, self.end_B = gathered["hidden_TH"], gathered["draft_end_B"]

    @property
    def position_T(self) -> Tensor:
        """As Growth."""
        return self._start.gathered["position_DT"][self._level - 1]

    def visible_rows(self) -> Tensor:
        """As Growth."""
        return self._steps.ones(len(self.end_B), 1, self._level)

    def advance(self, output: DraftOutput) -> None:
        """As Growth."""
        proposals = self._steps.propose(
            output, self.slots_T, self.position_T, topk=1, mode=self._mode, proposer=self._proposer
        )
        self._level += 1
        self.token_T = triton_draft.extend_chain(
            proposals,
            self._proposer.draft.target_ids_V,
            self._start.gathered["token_BN"],
            column=self._level,
        )
        self.hidden_TH = output.hidden_TH

    def finish(self) -> Tree:
        """As Growth."""
        return self._steps.chain(self._start)


class TreeGrowth:
    """Implements steps.Growth for up to MAX_TOPK candidates a beam."""

    def __init__(
        self,
        steps: TritonSteps,
        start: GatheredStart,
        shape: TreeShape,
        *,
        mode: SamplingMode,
        proposer: Proposer,
    ) -> None:
        self._steps, self._shape, self._mode, self._proposer = steps, shape, mode, proposer
        self._start, self._level = start, 1
        gathered, num_requests = start.gathered, len(start.slots_B)
        self.slots_T, self.end_B = gathered["slots_T"], gathered["draft_end_B"]
        self._beams = trees.Beams(
            token_T=gathered["token_T"],
            score_T=gathered["score_T"],
            candidate_T=gathered["candidate_T"],
            seen_T=gathered["seen_T"],
            hidden_TH=gathered["hidden_TH"],
        )
        self._candidates = trees.Candidates(
            *(gathered[f"{name}_BA"] for name in ("token", "score", "parent"))
        )
        self._visible = steps.eye(num_requests, shape.topk)

    @property
    def token_T(self) -> Tensor:
        """As Growth."""
        return self._beams.token_T

    @property
    def hidden_TH(self) -> Tensor:
        """As Growth."""
        return self._beams.hidden_TH

    @property
    def position_T(self) -> Tensor:
        """As Growth."""
        return self._start.gathered["position_DT"][self._level - 1]

    def visible_rows(self) -> Tensor:
        """As Growth."""
        return self._visible

    def advance(self, output: DraftOutput) -> None:
        """As Growth."""
        proposer, topk = self._proposer, self._shape.topk
        proposals = self._steps.propose(
            output, self.slots_T, self.position_T, topk=topk, mode=self._mode, proposer=proposer
        )
        self._beams, self._visible = trees.advance(
            proposals,
            proposer.draft.target_ids_V,
            self._beams,
            output.hidden_TH,
            self._candidates,
            level=self._level,
            depth=self._shape.depth,
        )
        self._level += 1

    def finish(self) -> Tree:
        """As Growth."""
        token_BN, parent_BN, depth_BN, position_BN, visible_BNN = trees.finish(
            self._candidates,
            self._start.gathered["root_B"],
            self._start.length_B,
            num_nodes=self._shape.num_nodes,
            depth=self._shape.depth,
        )
        return PlacedTree(token_BN, parent_BN, depth_BN, visible_BNN, position_BN)
