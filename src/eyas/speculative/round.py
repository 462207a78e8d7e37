"""One round: draft -> verify -> accept -> commit -> extend; and the prefill, which ends the same.

Plain decoding is the round with the root alone (D1). Everything here is torch operations with
static shapes on device tensors: no host synchronisation, so that a round can be captured (D6, D15).

With L committed tokens, the pending token x_L has neither target keys nor a row in the pages yet.
A tree node of depth d is verified at position L + d; its token was chosen with the noise of
position L + d, and the target's choice at the node uses that of position L + d + 1 (D9).

Shape suffixes: B requests, N tree nodes, E emitted tokens at most (depth + 1), T rows, K topk,
V vocabulary, H draft hidden, F captured features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from eyas import kernels
from eyas.config import TreeShape
from eyas.contract.attention import Attention
from eyas.contract.draft import Draft
from eyas.contract.target import Target
from eyas.speculative.state import SlotState
from eyas.speculative.tree import Tree, TreeBuilder, chain_tree

RESULT_EXTRA = 3  # columns after the tokens: emitted, finish, accepted


class Backend(Protocol):
    """What the round needs of an attention backend (attention.torch_backend.TorchBackend)."""

    @property
    def pool(self) -> Pool:
        """The pool that the plans read and write."""

    def page_rows(self, page_table_BP: Tensor, index_BQ: Tensor) -> Tensor:
        """Pool rows of cache indices."""

    def scratch_rows(self, slots_B: Tensor, node_Q: Tensor) -> Tensor:
        """Pool rows of scratch nodes."""

    def plan_tree(
        self,
        *,
        page_table_BP: Tensor,
        slots_B: Tensor,
        first_index: int,
        end_index_B: Tensor,
        visible_BQN: Tensor,
        first_node: int,
        max_kv_len: int,
    ) -> Attention:
        """Paged prefix and masked scratch tail."""

    def plan_prefill(
        self, *, page_table_BP: Tensor, chunks: Sequence[tuple[int, int]], device: torch.device
    ) -> Attention:
        """Causal prompt chunks."""

    def plan_write(self, write_T: Tensor) -> Attention:
        """Only store."""


class Pool(Protocol):
    """What the round needs of a KV pool (cache.pool.KVPool)."""

    @property
    def trash_row(self) -> int:
        """A row that nobody reads."""

    def copy_rows(self, source_T: Tensor, destination_T: Tensor) -> None:
        """Copy rows in all layers."""


@dataclasses.dataclass(frozen=True)
class DraftSide:
    """The draft with its attention backend."""

    model: Draft
    backend: Backend


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """A piece of one request's prompt: positions start .. end - 1, end exclusive.

    token_ids: the prompt's tokens at these positions. next_token: the prompt's token at `end`, or
    None when the chunk ends the prompt, which samples it.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    next_token: int | None

    @property
    def end(self) -> int:
        """Position after the chunk."""
        return self.start + len(self.token_ids)


class RoundRunner:
    """Runs rounds and prefill chunks over the slots of one worker."""

    def __init__(
        self, *, target: Target, backend: Backend, state: SlotState, draft: DraftSide | None
    ) -> None:
        self.target, self.backend, self.state, self.draft = target, backend, state, draft

    def round(self, slots_B: Tensor, shape: TreeShape, *, max_kv_len: int, sampled: bool) -> Tensor:
        """Run one round for the slots (int64 [B], padding repeats the trash slot).

        max_kv_len: no slot's length is above it. sampled: False promises that every request
        is greedy. Returns int64 [B, E + 3]: emitted tokens (the first num_emitted are valid),
        num_emitted, finish code (kernels.NO_FINISH, ...), num_accepted before any cut.
        A speculative shape needs `prime` first if the last extend of a slot was a plain one.
        """
        state = self.state
        length_B = state.length_S[slots_B]
        page_table_BP = state.page_table_SP[slots_B]
        tree = self._draft_tree(slots_B, shape, max_kv_len=max_kv_len, sampled=sampled)
        num_nodes = shape.num_nodes
        plan = self.backend.plan_tree(
            page_table_BP=page_table_BP,
            slots_B=slots_B,
            first_index=0,
            end_index_B=length_B,
            visible_BQN=tree.visible_BNN,
            first_node=0,
            max_kv_len=max_kv_len,
        )
        position_T = (length_B[:, None] + tree.depth_BN).reshape(-1)
        output = self.target.forward(tree.token_BN.reshape(-1), position_T, plan)
        chosen_T = self._choose(
            self.target.compute_logits(output.hidden_TH),
            slots_B.repeat_interleave(num_nodes),
            position_T + 1,
            sampled,
        )
        path_BE, emitted_BE, num_accepted_B = kernels.walk_tree(
            tree.token_BN, tree.parent_BN, chosen_T.view(-1, num_nodes), depth=shape.depth
        )
        num_emitted_B, finish_B = self._emit(slots_B, emitted_BE, num_accepted_B)
        self._commit(slots_B, page_table_BP, length_B, path_BE, num_emitted_B)
        if self.draft is not None:
            assert output.features_TF is not None
            first_row_B = torch.arange(len(slots_B), device=path_BE.device) * num_nodes
            self._extend(
                slots_B,
                page_table_BP,
                length_B,
                emitted_BE,
                output.features_TF[(first_row_B[:, None] + path_BE).reshape(-1)],
                num_emitted_B,
            )
            if shape.depth:
                self.prime(slots_B, max_kv_len=max_kv_len + shape.depth + 1, sampled=sampled)
        extra = torch.stack((num_emitted_B, finish_B, num_accepted_B), dim=1)
        return torch.cat((emitted_BE, extra), dim=1)

    def prefill(self, chunks: Sequence[PrefillChunk], *, sampled: bool, prime: bool) -> Tensor:
        """Run prompt chunks of several requests; int64 [B, 1 + 3] as `round`, E = 1.

        Requests whose prompt is not finished emit nothing. prime: also prepare the first-level
        candidates, which the next speculative round needs.
        """
        state, device = self.state, self.state.device
        slots_B = torch.tensor([c.slot for c in chunks], device=device)
        page_table_BP = state.page_table_SP[slots_B]
        tokens_T = torch.tensor([t for c in chunks for t in c.token_ids], device=device)
        positions = [p for c in chunks for p in range(c.start, c.end)]
        position_T = torch.tensor(positions, device=device)
        plan = self.backend.plan_prefill(
            page_table_BP=page_table_BP, chunks=[(c.start, c.end) for c in chunks], device=device
        )
        output = self.target.forward(tokens_T, position_T, plan)
        lengths_B = torch.tensor([len(c.token_ids) for c in chunks], device=device)
        last_B = lengths_B.cumsum(0) - 1
        final_B = torch.tensor([c.next_token is None for c in chunks], device=device)
        end_B = torch.tensor([c.end for c in chunks], device=device)
        logits_BV = self.target.compute_logits(output.hidden_TH[last_B])
        chosen_B = self._choose(logits_BV, slots_B, end_B, sampled)
        known_B = torch.tensor([c.next_token or 0 for c in chunks], device=device)
        next_B = torch.where(final_B, chosen_B, known_B)
        state.length_S[slots_B] = end_B
        state.active_S[slots_B] = final_B
        num_accepted_B = torch.zeros_like(end_B)
        num_emitted_B, finish_B = self._emit(slots_B, next_B[:, None], num_accepted_B, grow=False)
        state.pending_S[slots_B] = next_B
        if self.draft is not None:
            assert output.features_TF is not None
            shifted_T = tokens_T.roll(-1)
            shifted_T[last_B] = next_B
            request_T = torch.arange(len(chunks), device=device).repeat_interleave(lengths_B)
            row_T = self._draft_rows(page_table_BP[request_T], position_T[:, None] + 1)
            self._extend_rows(shifted_T, output.features_TF, position_T, row_T, slots_B, last_B)
            if prime:
                self.prime(slots_B, max_kv_len=max(c.end for c in chunks) + 1, sampled=sampled)
        extra = torch.stack((num_emitted_B, finish_B, num_accepted_B), dim=1)
        return torch.cat((next_B[:, None], extra), dim=1)

    def prime(self, slots_B: Tensor, *, max_kv_len: int, sampled: bool) -> None:
        """Run the draft's last row of each slot: its hidden state and first-level candidates.

        The row is the pair (pending token, s of the last committed token) at position L - 1. Its
        own key goes to scratch here too, so that a slot without any page can run.
        """
        draft, state = self._draft, self.state
        length_B = state.length_S[slots_B]
        own = torch.ones(len(slots_B), 1, 1, dtype=torch.bool, device=slots_B.device)
        plan = draft.backend.plan_tree(
            page_table_BP=state.page_table_SP[slots_B],
            slots_B=slots_B,
            first_index=1,
            end_index_B=length_B,
            visible_BQN=own,
            first_node=0,
            max_kv_len=max_kv_len,
        )
        output = draft.model.forward(
            state.pending_S[slots_B],
            state.draft_input_SH[slots_B],
            (length_B - 1).clamp(min=0),
            slots_B,
            plan,
        )
        topk = state.candidate_token_SK.shape[1]
        token_BK, score_BK = self._propose(
            output.logits_TV, slots_B, length_B + 1, topk=topk, sampled=sampled
        )
        state.draft_hidden_SH[slots_B] = output.hidden_TH
        state.candidate_token_SK[slots_B] = token_BK
        state.candidate_score_SK[slots_B] = score_BK

    @property
    def _draft(self) -> DraftSide:
        assert self.draft is not None, "a speculative round needs a draft"
        return self.draft

    def _draft_tree(
        self, slots_B: Tensor, shape: TreeShape, *, max_kv_len: int, sampled: bool
    ) -> Tree:
        """Grow the tree from the first-level candidates; draft rows live in scratch."""
        state = self.state
        pending_B = state.pending_S[slots_B]
        if not shape.depth:
            return chain_tree(pending_B[:, None])
        draft, topk = self._draft, shape.topk
        length_B, page_table_BP = state.length_S[slots_B], state.page_table_SP[slots_B]
        builder = TreeBuilder(
            shape,
            state.candidate_token_SK[slots_B, :topk],
            state.candidate_score_SK[slots_B, :topk],
        )
        hidden_BKH = state.draft_hidden_SH[slots_B][:, None].expand(-1, topk, -1)
        chain = [pending_B, builder.token_BK[:, 0]]
        slots_T = slots_B.repeat_interleave(topk)
        for level in range(1, shape.depth):
            plan = draft.backend.plan_tree(
                page_table_BP=page_table_BP,
                slots_B=slots_B,
                first_index=1,
                end_index_B=length_B + 1,
                visible_BQN=builder.visible_rows(),
                first_node=(level - 1) * topk,
                max_kv_len=max_kv_len + 1,
            )
            # A candidate of depth d is consumed at position L + d - 1.
            position_T = (length_B + level - 1).repeat_interleave(topk)
            output = draft.model.forward(
                builder.token_BK.reshape(-1), hidden_BKH.flatten(0, 1), position_T, slots_T, plan
            )
            token_TK, score_TK = self._propose(
                output.logits_TV, slots_T, position_T + 2, topk=topk, sampled=sampled
            )
            hidden_BKH = builder.advance(
                token_TK.view(-1, topk, topk),
                score_TK.view(-1, topk, topk),
                output.hidden_TH.view(len(slots_B), topk, -1),
            )
            chain.append(builder.token_BK[:, 0])
        if shape.is_chain:
            return chain_tree(torch.stack(chain, dim=1))
        return builder.finish(pending_B)

    def _choose(
        self, logits_TV: Tensor, slots_T: Tensor, position_T: Tensor, sampled: bool
    ) -> Tensor:
        """The target's token y at each row, by D9's rule."""
        state = self.state
        noise_TV = None
        if sampled:
            token_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
            noise_TV = kernels.gumbel_noise(state.seed_S[slots_T], position_T, token_V)
        return kernels.choose_tokens(logits_TV, state.temperature_S[slots_T], noise_TV)

    def _propose(
        self, logits_TV: Tensor, slots_T: Tensor, position_T: Tensor, *, topk: int, sampled: bool
    ) -> tuple[Tensor, Tensor]:
        """topk candidates a row as target ids, and their scores: log-softmax of the draft's
        logits with the target's noise added where the request samples (D9)."""
        target_id_V = self._draft.model.target_ids_V
        scores_TV = logits_TV.float()
        if sampled:
            temperature_T1 = self.state.temperature_S[slots_T][:, None]
            noise_TV = kernels.gumbel_noise(self.state.seed_S[slots_T], position_T, target_id_V)
            warm_TV = scores_TV / torch.where(temperature_T1 > 0, temperature_T1, 1.0) + noise_TV
            scores_TV = torch.where(temperature_T1 > 0, warm_TV, scores_TV)
        if topk == 1:  # nothing is ranked against anything: no softmax needed
            best_T1 = scores_TV.argmax(-1, keepdim=True)
            return target_id_V[best_T1], torch.zeros_like(best_T1, dtype=torch.float32)
        score_TK, best_TK = scores_TV.topk(topk, dim=-1)
        return target_id_V[best_TK], score_TK - scores_TV.logsumexp(-1, keepdim=True)

    def _emit(
        self, slots_B: Tensor, emitted_BE: Tensor, num_accepted_B: Tensor, *, grow: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Cut at stop tokens and limits, and move length, pending, remaining, active (D6)."""
        state = self.state
        active_B = state.active_S[slots_B]
        remaining_B = state.remaining_S[slots_B]
        num_emitted_B, finish_B = kernels.cut_emitted(
            emitted_BE,
            num_accepted_B,
            stop_ids_BS=state.stop_ids_SM[slots_B],
            remaining_B=remaining_B,
            active_B=active_B,
        )
        last_B1 = (num_emitted_B - 1).clamp(min=0)[:, None]
        pending_B = emitted_BE.gather(1, last_B1)[:, 0]
        state.remaining_S[slots_B] = remaining_B - num_emitted_B
        state.active_S[slots_B] = active_B & (finish_B == kernels.NO_FINISH)
        if grow:
            state.length_S[slots_B] = state.length_S[slots_B] + num_emitted_B
            kept_B = state.pending_S[slots_B]
            state.pending_S[slots_B] = torch.where(num_emitted_B > 0, pending_B, kept_B)
        return num_emitted_B, finish_B

    def _commit(
        self,
        slots_B: Tensor,
        page_table_BP: Tensor,
        length_B: Tensor,
        path_BE: Tensor,
        num_emitted_B: Tensor,
    ) -> None:
        """Copy the accepted path's rows from scratch to pages L .. L + num_emitted - 1."""
        pool = self.backend.pool
        step_E = torch.arange(path_BE.shape[1], device=path_BE.device)
        base_B1 = self.backend.scratch_rows(slots_B, step_E[:1])
        destination_BE = self._rows_or_trash(
            self.backend, page_table_BP, length_B[:, None] + step_E, num_emitted_B
        )
        pool.copy_rows((base_B1 + path_BE).reshape(-1), destination_BE.reshape(-1))

    def _rows_or_trash(
        self, backend: Backend, page_table_BP: Tensor, index_BE: Tensor, num_valid_B: Tensor
    ) -> Tensor:
        """Page rows of the first num_valid indices of each request; the trash row for the rest."""
        step_E = torch.arange(index_BE.shape[1], device=index_BE.device)
        valid_BE = step_E < num_valid_B[:, None]
        row_BE = backend.page_rows(page_table_BP, torch.where(valid_BE, index_BE, 0))
        return torch.where(valid_BE, row_BE, backend.pool.trash_row)

    def _extend(
        self,
        slots_B: Tensor,
        page_table_BP: Tensor,
        length_B: Tensor,
        emitted_BE: Tensor,
        features_TF: Tensor,
        num_emitted_B: Tensor,
    ) -> None:
        """Store the draft's entries of the committed path: pairs (emitted j, features of node j)
        at rotary positions L + j, index L + j + 1."""
        step_E = torch.arange(emitted_BE.shape[1], device=emitted_BE.device)
        position_BE = length_B[:, None] + step_E
        row_BE = self._rows_or_trash(
            self._draft.backend, page_table_BP, position_BE + 1, num_emitted_B
        )
        first_B = torch.arange(len(slots_B), device=slots_B.device) * emitted_BE.shape[1]
        last_B = first_B + (num_emitted_B - 1).clamp(min=0)
        # A finished request keeps its last state: nothing was emitted, nothing is stored.
        keep_SH = self.state.draft_input_SH[slots_B]
        self._extend_rows(
            emitted_BE.reshape(-1),
            features_TF,
            position_BE.reshape(-1),
            row_BE.reshape(-1),
            slots_B,
            last_B,
        )
        stored_BH = self.state.draft_input_SH[slots_B]
        moved_B1 = (num_emitted_B > 0)[:, None]
        self.state.draft_input_SH[slots_B] = torch.where(moved_B1, stored_BH, keep_SH)

    def _draft_rows(self, page_table_TP: Tensor, index_T1: Tensor) -> Tensor:
        return self._draft.backend.page_rows(page_table_TP, index_T1)[:, 0]

    def _extend_rows(
        self,
        tokens_T: Tensor,
        features_TF: Tensor,
        position_T: Tensor,
        row_T: Tensor,
        slots_B: Tensor,
        last_B: Tensor,
    ) -> None:
        draft = self._draft
        hidden_TH = draft.model.combine(features_TF)
        draft.model.write_kv(tokens_T, hidden_TH, position_T, draft.backend.plan_write(row_T))
        self.state.draft_input_SH[slots_B] = hidden_TH[last_B]
