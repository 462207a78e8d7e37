"""Choosing tokens at every row by D9's rule, and what emitting them changes in the slots.

Shape suffixes: B requests, N tree nodes, E emitted tokens at most, T rows (B * N), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas import kernels
from eyas.contract.target import LocalLogits
from eyas.kernels import SamplingMode
from eyas.speculative.parts import best_of_parts
from eyas.speculative.state import SlotState
from eyas.speculative.tree import Tree


class Sampler:
    """The target's choice y = argmax(log p + G) per row, p after all processors."""

    def __init__(self, state: SlotState) -> None:
        self.state = state

    def choose(
        self,
        logits_TV: Tensor,
        slots_T: Tensor,
        position_T: Tensor,
        *,
        mode: SamplingMode,
        tree: Tree | None = None,
    ) -> Tensor:
        """The token of each row, int64 [T].

        position_T: position of the token to be chosen (the noise is a function of it).
        tree: the rows are its nodes, so that penalties and min_tokens count the tokens on the way
        from the root; None: rows that follow what the slots know directly.
        """
        state = self.state
        if mode.penalize:
            count_TV = state.output_count_SV.index_select(0, slots_T)
            if tree is not None:
                count_TV = count_TV + _path_counts(tree, logits_TV.shape[1])
            logits_TV = kernels.apply_penalties(
                logits_TV,
                count_RV=count_TV,
                prompt_RV=state.prompt_seen_SV.index_select(0, slots_T),
                presence_R=state.presence_S.index_select(0, slots_T),
                frequency_R=state.frequency_S.index_select(0, slots_T),
                repetition_R=state.repetition_S.index_select(0, slots_T),
            )
        if mode.bias:
            logits_TV = self._bias(logits_TV, slots_T, tree)
        noise_TV = None
        if mode.noise:
            token_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
            noise_TV = kernels.gumbel_noise(
                state.seed_S.index_select(0, slots_T), position_T, token_V
            )
        temperature_T = state.temperature_S.index_select(0, slots_T)
        if mode.truncate:
            logits_TV = self._truncate(logits_TV, temperature_T, slots_T)
        return kernels.choose_tokens(logits_TV, temperature_T, noise_TV)

    def choose_of(
        self,
        logits: LocalLogits,
        slots_T: Tensor,
        position_T: Tensor,
        *,
        mode: SamplingMode,
        tree: Tree | None = None,
    ) -> Tensor:
        """As `choose`, of logits that ranks may share: all of them are gathered only where a
        request needs more than the best one."""
        part = logits.part
        if part is None or mode.penalize or mode.bias or mode.truncate:
            return self.choose(logits.whole_TV, slots_T, position_T, mode=mode, tree=tree)
        scores_TV = logits.logits_TV
        if mode.noise:
            state = self.state
            token_V = torch.arange(part.first, part.first + part.size, device=scores_TV.device)
            noise_TV = kernels.gumbel_noise(
                state.seed_S.index_select(0, slots_T), position_T, token_V
            )
            temperature_T1 = state.temperature_S.index_select(0, slots_T)[:, None]
            warm_TV = scores_TV.float() / torch.where(temperature_T1 > 0, temperature_T1, 1.0)
            scores_TV = torch.where(temperature_T1 > 0, warm_TV + noise_TV, warm_TV)
        return best_of_parts(scores_TV, part)

    def _bias(self, logits_TV: Tensor, slots_T: Tensor, tree: Tree | None) -> Tensor:
        """logit_bias, and -inf on the stop tokens of rows before min_tokens."""
        state = self.state
        logits_TV = logits_TV.float().scatter_add(
            1,
            state.bias_id_SA.index_select(0, slots_T),
            state.bias_value_SA.index_select(0, slots_T),
        )
        emitted_T = state.emitted_S.index_select(0, slots_T)
        if tree is not None:
            emitted_T = emitted_T + tree.depth_BN.reshape(-1)
        early_T1 = (emitted_T < state.min_tokens_S.index_select(0, slots_T))[:, None]
        stop_TM = state.stop_ids_SM.index_select(0, slots_T)
        # Padding is -1; a tokenizer may have end tokens past the model's rows.
        known_TM = (stop_TM >= 0) & (stop_TM < logits_TV.shape[1])
        value_TM = torch.where(early_T1 & known_TM, float("-inf"), 0.0)
        return logits_TV.scatter_add(1, torch.where(known_TM, stop_TM, 0), value_TM)

    def _truncate(self, logits_TV: Tensor, temperature_T: Tensor, slots_T: Tensor) -> Tensor:
        """top-k, top-p and min-p on the tempered logits; the temperature is undone again, as the
        choice divides by it (a greedy row keeps its best token whatever is cut)."""
        temperature_T1 = torch.where(temperature_T > 0, temperature_T, 1.0)[:, None]
        state = self.state
        scores_TV = kernels.truncate(
            logits_TV.float() / temperature_T1,
            top_k_R=state.top_k_S.index_select(0, slots_T),
            top_p_R=state.top_p_S.index_select(0, slots_T),
            min_p_R=state.min_p_S.index_select(0, slots_T),
        )
        return logits_TV.float().masked_fill(scores_TV == float("-inf"), float("-inf"))

    def emit(
        self,
        slots_B: Tensor,
        emitted_BE: Tensor,
        num_accepted_B: Tensor,
        *,
        mode: SamplingMode,
    ) -> tuple[Tensor, Tensor]:
        """Cut at stop tokens and limits; move remaining, emitted, active and the counts (D6).

        Returns (num_emitted_B, finish_B).
        """
        state = self.state
        active_B = state.active_S.index_select(0, slots_B)
        remaining_B = state.remaining_S.index_select(0, slots_B)
        num_emitted_B, finish_B = kernels.cut_emitted(
            emitted_BE,
            num_accepted_B,
            stop_ids_BS=state.stop_ids_SM.index_select(0, slots_B),
            remaining_B=remaining_B,
            active_B=active_B,
        )
        state.remaining_S.index_copy_(0, slots_B, remaining_B - num_emitted_B)
        state.emitted_S.index_copy_(
            0, slots_B, state.emitted_S.index_select(0, slots_B) + num_emitted_B
        )
        state.active_S.index_copy_(0, slots_B, active_B & (finish_B == kernels.NO_FINISH))
        if mode.penalize:
            step_E = torch.arange(emitted_BE.shape[1], device=emitted_BE.device)
            valid_BE = (step_E < num_emitted_B[:, None]).to(torch.int32)
            cell_BE = slots_B[:, None] * state.output_count_SV.shape[1] + emitted_BE
            state.output_count_SV.view(-1).index_add_(0, cell_BE.reshape(-1), valid_BE.reshape(-1))
        return num_emitted_B, finish_B


def _path_counts(tree: Tree, vocab_size: int) -> Tensor:
    """int32 [T, V]: how often each token lies on the way from the root's children to the node.

    The root's own token was emitted in an earlier round and is counted in the slot.
    """
    num_requests, num_nodes = tree.token_BN.shape
    on_path_BNN = tree.visible_BNN[:, :, 1:].to(torch.int32)
    token_BNN = tree.token_BN[:, None, 1:].expand(-1, num_nodes, -1)
    count = torch.zeros(
        num_requests, num_nodes, vocab_size, dtype=torch.int32, device=tree.token_BN.device
    )
    return count.scatter_add(2, token_BNN, on_path_BNN).flatten(0, 1)
