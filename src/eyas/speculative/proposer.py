"""The draft's side of a round: growing the tree, and the extend that comes last (D1, D7).

A one-layer draft's keys and values depend only on (token, fc(features)), so rows that are not the
last of their request store keys and values and nothing more; `prime` runs the last row.

Shape suffixes: B requests, T rows, K topk, V draft vocabulary, H draft hidden, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas import kernels
from eyas.cache.pool import TRASH_PAGE
from eyas.config import TreeShape
from eyas.contract.draft import Draft
from eyas.kernels import SamplingMode
from eyas.speculative.backend import Backend
from eyas.speculative.state import SlotState
from eyas.speculative.tree import Tree, TreeBuilder, chain_tree


class Proposer:
    """Runs one draft over the slots. page_end_PH: s of each page's last token (D7)."""

    def __init__(self, draft: Draft, backend: Backend, state: SlotState, *, num_pages: int) -> None:
        self.draft, self.backend, self.state = draft, backend, state
        hidden = state.draft_input_SH
        self.page_end_PH = hidden.new_zeros(num_pages, hidden.shape[1])

    def draft_tree(
        self, slots_B: Tensor, shape: TreeShape, *, max_kv_len: int, mode: SamplingMode
    ) -> Tree:
        """Grow the tree from the first-level candidates; draft rows live in scratch."""
        state, topk = self.state, shape.topk
        length_B = state.length_S.index_select(0, slots_B)
        page_table_BP = state.page_table_SP.index_select(0, slots_B)
        builder = TreeBuilder(
            shape,
            state.candidate_token_SK[slots_B, :topk],
            state.candidate_score_SK[slots_B, :topk],
        )
        hidden_BKH = state.draft_hidden_SH.index_select(0, slots_B)[:, None].expand(-1, topk, -1)
        chain = [state.pending_S.index_select(0, slots_B), builder.token_BK[:, 0]]
        slots_T = slots_B[:, None].expand(-1, topk).reshape(-1)
        for level in range(1, shape.depth):
            plan = self.backend.plan_tree(
                page_table_BP=page_table_BP,
                slots_B=slots_B,
                first_index=1,
                end_index_B=length_B + 1,
                visible_BQN=builder.visible_rows(),
                first_node=(level - 1) * topk,
                max_kv_len=max_kv_len + 1,
            )
            # A candidate of depth d is consumed at position L + d - 1.
            position_B = length_B + level - 1
            position_T = position_B[:, None].expand(-1, topk).reshape(-1)
            output = self.draft.forward(
                builder.token_BK.reshape(-1), hidden_BKH.flatten(0, 1), position_T, slots_T, plan
            )
            token_TK, score_TK = self._propose(
                output.logits_TV, slots_T, position_T + 2, topk=topk, mode=mode
            )
            hidden_BKH = builder.advance(
                token_TK.view(-1, topk, topk),
                score_TK.view(-1, topk, topk),
                output.hidden_TH.view(len(slots_B), topk, -1),
            )
            chain.append(builder.token_BK[:, 0])
        if shape.is_chain:
            return chain_tree(torch.stack(chain, dim=1))
        return builder.finish(chain[0])

    def prime(self, slots_B: Tensor, *, max_kv_len: int, mode: SamplingMode) -> None:
        """Run the draft's last row of each slot: its hidden state and first-level candidates.

        The row is the pair (pending token, s of the last committed token) at position L - 1. Its
        own key goes to scratch here too, so that a slot without any page can run.
        """
        state = self.state
        length_B = state.length_S.index_select(0, slots_B)
        own = torch.ones(len(slots_B), 1, 1, dtype=torch.bool, device=slots_B.device)
        plan = self.backend.plan_tree(
            page_table_BP=state.page_table_SP.index_select(0, slots_B),
            slots_B=slots_B,
            first_index=1,
            end_index_B=length_B,
            visible_BQN=own,
            first_node=0,
            max_kv_len=max_kv_len,
        )
        output = self.draft.forward(
            state.pending_S.index_select(0, slots_B),
            state.draft_input_SH.index_select(0, slots_B),
            (length_B - 1).clamp(min=0),
            slots_B,
            plan,
        )
        topk = state.candidate_token_SK.shape[1]
        token_BK, score_BK = self._propose(
            output.logits_TV, slots_B, length_B + 1, topk=topk, mode=mode
        )
        state.draft_hidden_SH.index_copy_(0, slots_B, output.hidden_TH)
        state.candidate_token_SK.index_copy_(0, slots_B, token_BK)
        state.candidate_score_SK.index_copy_(0, slots_B, score_BK)

    def _propose(
        self,
        logits_TV: Tensor,
        slots_T: Tensor,
        position_T: Tensor,
        *,
        topk: int,
        mode: SamplingMode,
    ) -> tuple[Tensor, Tensor]:
        """topk candidates a row as target ids, and their scores: log-softmax of the draft's
        logits with the target's noise added where the request samples (D9)."""
        target_id_V = self.draft.target_ids_V
        scores_TV = logits_TV.float()
        if mode.noise:
            temperature_T1 = self.state.temperature_S.index_select(0, slots_T)[:, None]
            noise_TV = kernels.gumbel_noise(
                self.state.seed_S.index_select(0, slots_T), position_T, target_id_V
            )
            warm_TV = scores_TV / torch.where(temperature_T1 > 0, temperature_T1, 1.0) + noise_TV
            scores_TV = torch.where(temperature_T1 > 0, warm_TV, scores_TV)
        if topk == 1:  # nothing is ranked against anything: no softmax needed
            best_T1 = scores_TV.argmax(-1, keepdim=True)
            return target_id_V[best_T1], torch.zeros_like(best_T1, dtype=torch.float32)
        score_TK, best_TK = scores_TV.topk(topk, dim=-1)
        return target_id_V[best_TK], score_TK - scores_TV.logsumexp(-1, keepdim=True)

    def extend(
        self,
        tokens_T: Tensor,
        features_TF: Tensor,
        position_T: Tensor,
        *,
        slots_T: Tensor,
        valid_T: Tensor,
        slots_B: Tensor,
        last_B: Tensor,
    ) -> None:
        """Store the draft's entries of committed tokens.

        Row t is the pair (tokens_T, features of position_T); its index is position + 1. Rows that
        are not valid go to the trash. last_B: each slot's last valid row, whose s is kept; a slot
        without any valid row keeps what it has.
        """
        state, size = self.state, self.backend.pool.page_size
        hidden_TH = self.draft.combine(features_TF)
        index_T = torch.where(valid_T, position_T + 1, 0)
        row_T = state.rows(slots_T, index_T, size)
        row_T = torch.where(valid_T, row_T, self.backend.pool.trash_row)
        self.draft.write_kv(tokens_T, hidden_TH, position_T, self.backend.plan_write(row_T))
        ends_page_T = valid_T & (index_T % size == 0)
        page_T = state.pages(slots_T, (index_T - 1).clamp(min=0), size)
        self.page_end_PH.index_copy_(0, torch.where(ends_page_T, page_T, TRASH_PAGE), hidden_TH)
        kept_BH = state.draft_input_SH.index_select(0, slots_B)
        moved_B1 = valid_T.index_select(0, last_B)[:, None]
        moved_BH = torch.where(moved_B1, hidden_TH.index_select(0, last_B), kept_BH)
        state.draft_input_SH.index_copy_(0, slots_B, moved_BH)

    def continue_from_page(self, slots_B: Tensor, tokens_B: Tensor, position_B: Tensor) -> None:
        """Store the entry that links a cached prefix to what follows (D7).

        position_B: the prefix's last position, the end of a page; tokens_B: the token after it.
        The page itself cannot hold this entry, as it depends on that token.
        """
        size = self.backend.pool.page_size
        page_B = self.state.pages(slots_B, position_B, size)
        row_B = self.state.rows(slots_B, position_B + 1, size)
        plan = self.backend.plan_write(row_B)
        self.draft.write_kv(tokens_B, self.page_end_PH.index_select(0, page_B), position_B, plan)
