"""Simulated acceptance: rounds of a chosen average length, for benchmarks with random weights.

The cost of a round does not depend on which tokens are right, so benchmarks can fix how many are
accepted. The output is not the target's own then.

Shape suffixes: B requests, D draft levels, E = D + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas import kernels
from eyas.speculative.state import SlotState
from eyas.speculative.tree import Tree


class SimulatedAcceptance:
    """Accepts the first child at each level with a given chance, whatever the target chose.

    rate_D: the chances, fp32.
    """

    def __init__(self, rates: tuple[float, ...], *, device: torch.device | str) -> None:
        self.rate_D = torch.tensor(rates, dtype=torch.float32, device=device)

    def accept(
        self, state: SlotState, slots_B: Tensor, tree: Tree, chosen_BN: Tensor, *, depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(path_BE, emitted_BE, num_accepted_B) as kernels.walk_tree; chances by seed and
        position, so that a run can be repeated."""
        step_D = torch.arange(depth, device=slots_B.device)
        gumbel_BD = kernels.gumbel_noise(
            state.seed_S.index_select(0, slots_B), state.length_S.index_select(0, slots_B), step_D
        )
        chance_BD = torch.exp(-torch.exp(-gumbel_BD))  # the noise's own uniform
        taken_BD = (chance_BD < self.rate_D[:depth]).to(torch.int64)
        num_accepted_B = taken_BD.cumprod(1).sum(1)
        node_B = torch.zeros_like(slots_B)
        path = [node_B]
        for _ in range(depth):
            child_BN = (tree.parent_BN == node_B[:, None]).to(torch.int8)
            found_B = child_BN.amax(1) > 0
            node_B = torch.where(found_B, child_BN.argmax(1), node_B)
            num_accepted_B = torch.where(
                found_B, num_accepted_B, num_accepted_B.clamp(max=len(path) - 1)
            )
            path.append(node_B)
        path_BE = torch.stack(path, dim=1)
        token_BE = tree.token_BN.gather(1, path_BE).roll(-1, dims=1)  # emitted j is node j + 1
        step_E = torch.arange(depth + 1, device=slots_B.device)
        bonus_BE = chosen_BN.gather(1, path_BE)
        emitted_BE = torch.where(step_E < num_accepted_B[:, None], token_BE, bonus_BE)
        return path_BE, emitted_BE, num_accepted_B
