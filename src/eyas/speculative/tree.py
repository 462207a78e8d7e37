"""Draft trees: growth by cumulative score and pruning to a fixed number of nodes.

The procedure is EAGLE-2's dynamic tree (Li et al., 2024, section 4): each beam proposes its topk
children, the topk best of all children by cumulative score are expanded next, and the best nodes
overall are kept. Scores only decide what is verified, never what is emitted (D9). A chain is the
case topk = 1.

Shape suffixes: B requests, K beams (topk), C candidates so far, N nodes kept (root included),
V draft vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from eyas.config import TreeShape


@dataclasses.dataclass(frozen=True)
class Tree:
    """A batch of trees of one size; node 0 is the root and parents come before children.

    token_BN, depth_BN: int64. parent_BN: int64, -1 at the root. visible_BNN: bool, True where a
    node (dim 1) may attend to a node (dim 2): itself, its ancestors and the root.
    """

    token_BN: Tensor
    parent_BN: Tensor
    depth_BN: Tensor
    visible_BNN: Tensor

    def positions(self, length_B: Tensor) -> Tensor:
        """int64 [B, N]: a node of depth d stands at position L + d."""
        return length_B[:, None] + self.depth_BN


@dataclasses.dataclass(frozen=True)
class PlacedTree(Tree):
    """A tree whose nodes' positions are known already."""

    position_BN: Tensor

    def positions(self, length_B: Tensor) -> Tensor:
        """int64 [B, N]."""
        return self.position_BN


def chain_tree(token_BN: Tensor) -> Tree:
    """The tree in which every node has one child; column 0 is the root."""
    num_requests, num_nodes = token_BN.shape
    depth_N = torch.arange(num_nodes, device=token_BN.device)
    visible = torch.ones(num_nodes, num_nodes, dtype=torch.bool, device=token_BN.device).tril_()
    return Tree(
        token_BN=token_BN,
        parent_BN=(depth_N - 1).expand(num_requests, -1),
        depth_BN=depth_N.expand(num_requests, -1),
        visible_BNN=visible.expand(num_requests, -1, -1),
    )


class TreeBuilder:
    """Collects candidates level by level and keeps what the next level needs of its beams.

    Every per-beam datum (draft hidden, ancestors, score, candidate index) is gathered by the same
    parent index, in `advance`.
    """

    def __init__(self, shape: TreeShape, token_BK: Tensor, score_BK: Tensor) -> None:
        """Start from the first-level candidates (target token ids) and their scores."""
        self._shape = shape
        num_requests, topk = token_BK.shape
        device = token_BK.device
        self._tokens, self._scores = [token_BK], [score_BK]
        self._parents = [torch.full_like(token_BK, -1)]  # the root; candidates count from 0
        self.token_BK, self._score_BK = token_BK, score_BK
        self._candidate_BK = torch.arange(topk, device=device).expand(num_requests, -1)
        # Draft rows (one per beam and level) which a beam attends to: its ancestors and itself.
        rows = torch.zeros(topk, max(shape.num_draft_rows, 1), dtype=torch.bool, device=device)
        self._visible_BKR = rows.expand(num_requests, -1, -1)
        self._level = 0

    def visible_rows(self) -> Tensor:
        """bool [B, K, rows so far]: draft rows each beam attends to, its own new row included."""
        first, topk = self._level * self._shape.topk, self._shape.topk
        own = torch.eye(topk, dtype=torch.bool, device=self.token_BK.device)
        own = own.expand(len(self.token_BK), -1, -1)
        return torch.cat((self._visible_BKR[:, :, :first], own), dim=2)

    def advance(self, token_BKK: Tensor, log_prob_BKK: Tensor, hidden_BKH: Tensor) -> Tensor:
        """Add each beam's topk children and move to the best topk of them all.

        Returns the new beams' parent hidden [B, K, H].
        """
        topk = self._shape.topk
        score_BC = (self._score_BK[:, :, None] + log_prob_BKK).flatten(1)
        token_BC = token_BKK.flatten(1)
        num_before = sum(tokens.shape[1] for tokens in self._tokens)
        self._tokens.append(token_BC)
        self._scores.append(score_BC)
        self._parents.append(self._candidate_BK.repeat_interleave(topk, dim=1))
        visible_BKR = self.visible_rows()
        self._level += 1
        self._score_BK, best_BK = score_BC.topk(topk, dim=1)
        beam_BK = best_BK // topk
        self.token_BK = token_BC.gather(1, best_BK)
        self._candidate_BK = best_BK + num_before
        self._visible_BKR = visible_BKR.gather(1, beam_BK[:, :, None].expand_as(visible_BKR))
        return hidden_BKH.gather(1, beam_BK[:, :, None].expand_as(hidden_BKH))

    def finish(self, root_B: Tensor) -> Tree:
        """The best num_nodes - 1 candidates under the root, in order of appearance.

        A child's score is at most its parent's and a stable sort keeps the earlier of two equals
        first, so that a kept node's parent is kept too.
        """
        num_kept = self._shape.num_nodes - 1
        score_BC = torch.cat(self._scores, dim=1)
        order_BC = score_BC.sort(dim=1, descending=True, stable=True).indices
        kept_BN = order_BC[:, :num_kept].sort(dim=1).values
        token_BN = torch.cat(self._tokens, dim=1).gather(1, kept_BN)
        parent_BN = torch.cat(self._parents, dim=1).gather(1, kept_BN)
        node_of_BC = torch.zeros_like(order_BC)
        number_N = torch.arange(1, num_kept + 1, device=root_B.device)
        node_of_BC = node_of_BC.scatter(1, kept_BN, number_N.expand_as(kept_BN))
        parent_BN = torch.where(parent_BN < 0, 0, node_of_BC.gather(1, parent_BN.clamp(min=0)))
        root_B1 = root_B[:, None]
        token_BN = torch.cat((root_B1, token_BN), dim=1)
        parent_BN = torch.cat((torch.full_like(root_B1, -1), parent_BN), dim=1)
        return tree_from_parents(token_BN, parent_BN, self._shape.depth)


def tree_from_parents(token_BN: Tensor, parent_BN: Tensor, depth: int) -> Tree:
    """Depths and ancestor masks of trees of at most `depth` levels under the root."""
    num_requests, num_nodes = token_BN.shape
    up_BN = parent_BN.clamp(min=0)
    visible = torch.eye(num_nodes, dtype=torch.bool, device=token_BN.device)
    visible_BNN = visible.expand(num_requests, -1, -1)
    up_BNN = up_BN[:, :, None].expand(-1, -1, num_nodes)
    for _ in range(depth):
        visible_BNN = visible_BNN | visible_BNN.gather(1, up_BNN)
    return Tree(token_BN, parent_BN, visible_BNN.sum(2) - 1, visible_BNN)
