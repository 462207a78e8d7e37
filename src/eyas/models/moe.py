"""A mixture of experts: routing by scores, and experts whose weights lie in one stack.

Shape suffixes: T tokens, H hidden, E experts, K experts of a token, G groups of experts, R rows
(T * K), B blocks of M rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas import kernels
from eyas.kernels.moe import RowGroups, group_rows, grouped_linear
from eyas.models.config import ExpertsConfig, ModelConfig
from eyas.models.layers import GatedMLP
from eyas.models.quantization import StoredWeight
from eyas.models.sharding import WHOLE, Parallel, Size


class Router(nn.Module):
    """Scores of the experts and the choice among them, in fp32.

    DeepSeek-V2 (2024), section 2.1.3 (softmax, groups by their best expert); DeepSeek-V3 (2024),
    section 2.1.2 (sigmoid, groups by their two best, a bias for the choice alone).
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        assert config.experts is not None
        self.config: ExpertsConfig = config.experts
        num_experts = config.experts.num_experts
        weight = torch.empty(num_experts, config.hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, False)
        self.e_score_correction_bias = None
        if config.experts.has_bias:
            bias = torch.empty(num_experts, dtype=torch.float32, device=device)
            self.e_score_correction_bias = nn.Parameter(bias, False)

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(experts [T, K] int64, weights [T, K] fp32)."""
        config = self.config
        logits_TE = F.linear(x_TH.float(), self.weight.float())
        sigmoid = config.scoring == "sigmoid"
        scores_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(-1)
        choice_TE = scores_TE
        if self.e_score_correction_bias is not None:
            choice_TE = scores_TE + self.e_score_correction_bias
        if config.topk_groups < config.num_groups:
            choice_TE = self._within_best_groups(choice_TE)
        expert_TK = choice_TE.topk(config.num_experts_per_token, dim=-1).indices
        weight_TK = scores_TE.gather(1, expert_TK)
        if config.normalizes:
            weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
        return expert_TK, weight_TK * config.scaling

    def _within_best_groups(self, choice_TE: Tensor) -> Tensor:
        config = self.config
        grouped_TGE = choice_TE.view(len(choice_TE), config.num_groups, -1)
        num_best = 1 if config.group_score == "max" else 2
        group_TG = grouped_TGE.topk(num_best, dim=-1).values.sum(-1)
        best_TK = group_TG.topk(config.topk_groups, dim=-1).indices
        outside_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter(1, best_TK, False)
        return grouped_TGE.masked_fill(outside_TG[..., None], float("-inf")).flatten(1)


class Experts(nn.Module):
    """The routed experts. Checkpoints name them one by one, `{i}.gate_proj` and so on."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: Parallel = WHOLE,
    ) -> None:
        super().__init__()
        self.shard, size = parallel.experts(config)
        self.group = parallel.group_of(self.shard if size.is_whole else size)

        def stack(size_in: Size, parts: dict[str, Size]) -> StoredWeight:
            return StoredWeight(
                size_in,
                parts,
                num_stacked=self.shard,
                quant=config.quant_of("experts"),
                dtype=dtype,
                device=device,
            )

        self.gate_up_proj = stack(config.hidden_size, {"gate_proj": size, "up_proj": size})
        self.down_proj = stack(size, {"down_proj": config.hidden_size})

    def forward(self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """The weighted sum of each token's experts [T, H], added up in fp32; this rank's part."""
        num_experts = self.shard.size
        if not self.shard.is_whole:
            # Rows of other ranks' experts count for nothing and are laid out behind all others.
            expert_TK = expert_TK - self.shard.start
            elsewhere_TK = (expert_TK < 0) | (expert_TK >= num_experts)
            expert_TK = torch.where(elsewhere_TK, num_experts, expert_TK)
            weight_TK = weight_TK.masked_fill(elsewhere_TK, 0)
        groups = group_rows(
            expert_TK.flatten(), num_experts=num_experts + (not self.shard.is_whole)
        )
        groups.expert_B.clamp_(max=num_experts - 1)
        # Nothing large has a name here: each is freed as soon as the next is there.
        out_BMH = self._multiply(
            self._inner(x_TH, groups, expert_TK.shape[1]), groups.expert_B, self.down_proj
        )
        out_TKH = out_BMH.flatten(0, 1)[groups.place_R].view(*expert_TK.shape, -1)
        del out_BMH
        return (out_TKH * weight_TK[..., None]).sum(1).to(x_TH.dtype)

    def _inner(self, x_TH: Tensor, groups: RowGroups, num_chosen: int) -> Tensor:
        gate_up = self._multiply(
            x_TH[groups.source_BM // num_chosen], groups.expert_B, self.gate_up_proj
        )
        return kernels.silu_mul(gate_up.flatten(0, 1)).view(*gate_up.shape[:2], -1)

    def _multiply(self, x_BMI: Tensor, expert_B: Tensor, stack: StoredWeight) -> Tensor:
        size = stack.shape[0] * stack.shape[1]
        return grouped_linear(x_BMI, expert_B, stack.dense, matrix_size=size)


class MixtureOfExperts(nn.Module):
    """Routed experts, and shared ones where the model has them."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: Parallel = WHOLE,
    ) -> None:
        super().__init__()
        assert config.experts is not None
        self.gate = Router(config, dtype=dtype, device=device)
        self.experts = Experts(config, dtype=dtype, device=device, parallel=parallel)
        self.shared_experts = None
        if config.experts.shared_size:
            self.shared_experts = GatedMLP(
                config,
                size=config.experts.shared_size,
                part="shared_experts",
                dtype=dtype,
                device=device,
                parallel=parallel,
            )

    def forward(self, x_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        group, shared = self.experts.group, self.shared_experts
        out_TH: Tensor = self.experts(x_TH, *self.gate(x_TH))
        if shared is None:
            return group.all_reduce(out_TH)
        if shared.group is group:  # one sum over the ranks is enough
            return group.all_reduce(out_TH + shared.partial(x_TH))
        return group.all_reduce(out_TH) + shared(x_TH)  # type: ignore[no-any-return]
