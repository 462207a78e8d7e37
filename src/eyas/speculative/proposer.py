"""The draft's side of a round: growing the tree, and the extend that comes last (D1, D7).

A one-layer draft's keys and values depend only on (token, fc(features)), so rows that are not the
last of their request store keys and values and nothing more; `prime` runs the last row.

Shape suffixes: B requests, T rows, K topk, V draft vocabulary, H draft hidden, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas import kernels
from eyas.config import TreeShape
from eyas.contract.draft import Draft
from eyas.contract.target import LocalLogits
from eyas.kernels import SamplingMode
from eyas.speculative.backend import Backend
from eyas.speculative.parts import best_of_parts, top_of_parts
from eyas.speculative.state import SlotState
from eyas.speculative.steps import (
    Entries,
    LastPairs,
    RoundStart,
    gather_pairs,
    place_entries,
    steps_for,
)
from eyas.speculative.tree import Tree


class Proposer:
    """Runs one draft over the slots. page_end_PH: s of each page's last token (D7)."""

    def __init__(self, draft: Draft, backend: Backend, state: SlotState, *, num_pages: int) -> None:
        self.draft, self.backend, self.state = draft, backend, state
        hidden = state.draft_input_SH
        self.page_end_PH = hidden.new_zeros(num_pages, hidden.shape[1])
        self.steps = steps_for(state)

    def draft_tree(
        self,
        slots_B: Tensor,
        shape: TreeShape,
        *,
        max_kv_len: int,
        mode: SamplingMode,
        start: RoundStart | None = None,
    ) -> Tree:
        """Grow the tree from the first-level candidates; draft rows live in scratch.

        start: the round's, where it has begun.
        """
        start = start or self.steps.begin(slots_B, shape)
        growth = self.steps.grow(start, shape, mode=mode, proposer=self)
        for level in range(1, shape.depth):
            plan = self.backend.plan_tree(
                page_table_BP=start.page_table_BP,
                slots_B=slots_B,
                first_index=1,
                end_index_B=growth.end_B,
                visible_BQN=growth.visible_rows(),
                first_node=(level - 1) * shape.topk,
                max_kv_len=max_kv_len + 1,
            )
            output = self.draft.forward(
                growth.token_T, growth.hidden_TH, growth.position_T, growth.slots_T, plan
            )
            growth.advance(output)
        return growth.finish()

    def prime(
        self,
        slots_B: Tensor,
        *,
        max_kv_len: int,
        mode: SamplingMode,
        pairs: LastPairs | None = None,
    ) -> None:
        """Run the draft's last row of each slot: its hidden state and first-level candidates.

        The row is the pair (pending token, s of the last committed token) at position L - 1. Its
        own key goes to scratch here too, so that a slot without any page can run. pairs: these
        rows, where they are known.
        """
        if pairs is None:
            table_BP = self.state.page_table_SP.index_select(0, slots_B)
            pairs = gather_pairs(self.state, slots_B, table_BP)
        plan = self.backend.plan_tree(
            page_table_BP=pairs.page_table_BP,
            slots_B=slots_B,
            first_index=1,
            end_index_B=pairs.length_B,
            visible_BQN=pairs.own_B11,
            first_node=0,
            max_kv_len=max_kv_len,
        )
        output = self.draft.forward(pairs.token_B, pairs.hidden_BH, pairs.position_B, slots_B, plan)
        self.steps.first_level(output, pairs, mode=mode, proposer=self)

    def propose(
        self,
        logits: LocalLogits,
        slots_T: Tensor,
        position_T: Tensor,
        *,
        topk: int,
        mode: SamplingMode,
    ) -> tuple[Tensor, Tensor]:
        """topk candidates a row as target ids, and their scores: log-softmax of the draft's
        logits with the target's noise added where the request samples (D9)."""
        target_id_V, part = self.draft.target_ids_V, logits.part
        own_id_V = target_id_V
        if part is not None:
            own_id_V = target_id_V[part.first : part.first + part.size]
        scores_TV = logits.logits_TV.float()
        if mode.noise:
            temperature_T1 = self.state.temperature_S.index_select(0, slots_T)[:, None]
            noise_TV = kernels.gumbel_noise(
                self.state.seed_S.index_select(0, slots_T), position_T, own_id_V
            )
            warm_TV = scores_TV / torch.where(temperature_T1 > 0, temperature_T1, 1.0) + noise_TV
            scores_TV = torch.where(temperature_T1 > 0, warm_TV, scores_TV)
        if part is not None and topk == 1:
            best_T1 = best_of_parts(scores_TV, part)[:, None]
            return target_id_V[best_T1], torch.zeros_like(best_T1, dtype=torch.float32)
        if part is not None:
            log_prob_TK, best_TK = top_of_parts(scores_TV, part, topk)
            return target_id_V[best_TK], log_prob_TK
        if topk == 1:  # nothing is ranked against anything: no softmax needed
            best_T1 = scores_TV.argmax(-1, keepdim=True)
            return target_id_V[best_T1], torch.zeros_like(best_T1, dtype=torch.float32)
        score_TK, best_TK = scores_TV.topk(topk, dim=-1)
        return target_id_V[best_TK], score_TK - scores_TV.logsumexp(-1, keepdim=True)

    def store(self, tokens_T: Tensor, features_TF: Tensor, entries: Entries) -> Tensor:
        """Store the draft's entries of committed tokens: row t is the pair (tokens_T, features).

        Rows that do not count go to the trash; a slot without any that does keeps what it has.
        Returns s of each slot's last committed token [B, H].
        """
        hidden_TH = self.draft.combine(features_TF)
        plan = self.backend.plan_write(entries.row_T)
        self.draft.write_kv(tokens_T, hidden_TH, entries.position_T, plan)
        return self.steps.keep(hidden_TH, entries, self.page_end_PH)

    def extend(
        self,
        tokens_T: Tensor,
        features_TF: Tensor,
        position_T: Tensor,
        *,
        slots_T: Tensor,
        slots_B: Tensor,
        last_B: Tensor,
    ) -> None:
        """Store the entries of prompt chunks; position_T: the tokens' before the pairs' own, at
        which the features are. last_B: each slot's last row."""
        entries = place_entries(
            self.state,
            self.backend.pool,
            position_T,
            slots_T=slots_T,
            valid_T=torch.ones_like(tokens_T, dtype=torch.bool),
            slots_B=slots_B,
            last_B=last_B,
        )
        self.store(tokens_T, features_TF, entries)

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
