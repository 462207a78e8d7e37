"""One round: draft -> verify -> accept -> commit -> extend; and the prefill, which ends the same.

Plain decoding is the round with the root alone (D1). Everything here is torch operations with
static shapes on device tensors: no host synchronisation, so that a round can be captured (D6, D15).

With L committed tokens, the pending token x_L has neither target keys nor a row in the pages yet.
A tree node of depth d is verified at position L + d; its token was chosen with the noise of
position L + d, and the target's choice at the node uses that of position L + d + 1 (D9).

Shape suffixes: B requests, N tree nodes, E emitted tokens at most (depth + 1), T rows,
V vocabulary, F captured features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eyas import kernels
from eyas.config import TreeShape
from eyas.contract.target import GivenRows, Target
from eyas.kernels import SamplingMode
from eyas.speculative.backend import Backend
from eyas.speculative.proposer import Proposer
from eyas.speculative.sampler import Sampler
from eyas.speculative.simulate import SimulatedAcceptance
from eyas.speculative.state import SlotState
from eyas.speculative.tree import Tree, chain_tree
from eyas.types import ImageInput


@dataclasses.dataclass(frozen=True)
class RoundOutput:
    """What a round tells the host, still on the device.

    packed: int64 [B, E + 3]: emitted tokens (the first num_emitted are valid), num_emitted,
    finish code (kernels.NO_FINISH, ...), num_accepted before any cut.
    logprob_id, logprob: [B, E, 1 + top], where the mode asks for them.
    """

    packed: Tensor
    logprob_id: Tensor | None = None
    logprob: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """A piece of one request's prompt: positions start .. end - 1, end exclusive.

    token_ids: the prompt's tokens at these positions. next_token: the prompt's token at `end`, or
    None when the chunk ends the prompt, which samples it. images: those with tokens in it.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    next_token: int | None
    images: Sequence[ImageInput] = ()

    @property
    def end(self) -> int:
        """Position after the chunk."""
        return self.start + len(self.token_ids)


class RoundRunner:
    """Runs rounds and prefill chunks over the slots of one worker. proposer: None without draft."""

    def __init__(
        self,
        *,
        target: Target,
        backend: Backend,
        state: SlotState,
        proposer: Proposer | None,
        simulated: SimulatedAcceptance | None = None,
    ) -> None:
        self.target, self.backend, self.state = target, backend, state
        self.proposer, self.sampler = proposer, Sampler(state)
        self.simulated = simulated
        # Told the name of each part of a round that has just ended; for hosts that time them.
        self.on_part: Callable[[str], None] | None = None

    def round(
        self, slots_B: Tensor, shape: TreeShape, *, max_kv_len: int, mode: SamplingMode
    ) -> RoundOutput:
        """Run one round for the slots (int64 [B], padding repeats the trash slot).

        max_kv_len: no slot's length is above it. mode: what the requests' sampling needs.
        A speculative shape needs `prime` first if the last round of a slot was a plain one.
        """
        state = self.state
        length_B = state.length_S.index_select(0, slots_B)
        page_table_BP = state.page_table_SP.index_select(0, slots_B)
        tree = self._tree(slots_B, shape, max_kv_len=max_kv_len, mode=mode)
        self._ended("draft")
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
        logits_TV = self.target.compute_logits(output.hidden_TH)
        slots_T = slots_B[:, None].expand(-1, shape.num_nodes).reshape(-1)
        chosen_T = self.sampler.choose(logits_TV, slots_T, position_T + 1, mode=mode, tree=tree)
        path_BE, emitted_BE, num_accepted_B = self._accept(slots_B, tree, chosen_T, shape)
        num_emitted_B, finish_B = self.sampler.emit(slots_B, emitted_BE, num_accepted_B, mode=mode)
        self._commit(slots_B, length_B, path_BE, emitted_BE, num_emitted_B)
        self._ended("verify")
        first_row_B1 = torch.arange(len(slots_B), device=path_BE.device)[:, None] * shape.num_nodes
        row_T = (first_row_B1 + path_BE).reshape(-1)
        if self.proposer is not None:
            assert output.features_TF is not None
            features_TF = output.features_TF.index_select(0, row_T)
            self._extend(slots_B, length_B, emitted_BE, features_TF, num_emitted_B)
            if shape.depth:
                longest = max_kv_len + shape.depth + 1
                self.proposer.prime(slots_B, max_kv_len=longest, mode=mode)
        self._ended("draft")
        extra = torch.stack((num_emitted_B, finish_B, num_accepted_B), dim=1)
        packed = torch.cat((emitted_BE, extra), dim=1)
        return _with_logprobs(packed, logits_TV, row_T, emitted_BE, mode)

    def prefill(
        self,
        chunks: Sequence[PrefillChunk],
        *,
        mode: SamplingMode,
        prime: bool,
        given: GivenRows | None = None,
    ) -> RoundOutput:
        """Run prompt chunks of several requests; E = 1.

        Requests whose prompt is not finished emit nothing. prime: also prepare the first-level
        candidates, which the next speculative round needs. given: the rows that are images; the
        draft sees their tokens, as published drafts are trained.
        """
        state, device = self.state, self.state.device
        slots_B = torch.tensor([c.slot for c in chunks], device=device)
        page_table_BP = state.page_table_SP.index_select(0, slots_B)
        tokens_T = torch.tensor([t for c in chunks for t in c.token_ids], device=device)
        positions = [p for c in chunks for p in range(c.start, c.end)]
        position_T = torch.tensor(positions, device=device)
        plan = self.backend.plan_prefill(
            page_table_BP=page_table_BP, chunks=[(c.start, c.end) for c in chunks], device=device
        )
        output = self.target.forward(tokens_T, position_T, plan, given)
        lengths_B = torch.tensor([len(c.token_ids) for c in chunks], device=device)
        last_B = lengths_B.cumsum(0) - 1
        final_B = torch.tensor([c.next_token is None for c in chunks], device=device)
        end_B = torch.tensor([c.end for c in chunks], device=device)
        logits_BV = self.target.compute_logits(output.hidden_TH.index_select(0, last_B))
        chosen_B = self.sampler.choose(logits_BV, slots_B, end_B, mode=mode)
        known_B = torch.tensor([c.next_token or 0 for c in chunks], device=device)
        next_B = torch.where(final_B, chosen_B, known_B)
        state.length_S.index_copy_(0, slots_B, end_B)
        state.pending_S.index_copy_(0, slots_B, next_B)
        state.active_S.index_copy_(0, slots_B, final_B)
        num_accepted_B = torch.zeros_like(end_B)
        num_emitted_B, finish_B = self.sampler.emit(
            slots_B, next_B[:, None], num_accepted_B, mode=mode
        )
        if self.proposer is not None:
            assert output.features_TF is not None
            self.proposer.extend(
                tokens_T.roll(-1).index_copy(0, last_B, next_B),
                output.features_TF,
                position_T,
                slots_T=slots_B.repeat_interleave(lengths_B, output_size=len(positions)),
                valid_T=torch.ones_like(tokens_T, dtype=torch.bool),
                slots_B=slots_B,
                last_B=last_B,
            )
            if prime:
                longest = max(c.end for c in chunks) + 1
                self.proposer.prime(slots_B, max_kv_len=longest, mode=mode)
        extra = torch.stack((num_emitted_B, finish_B, num_accepted_B), dim=1)
        packed = torch.cat((next_B[:, None], extra), dim=1)
        rows_B = torch.arange(len(chunks), device=device)
        return _with_logprobs(packed, logits_BV, rows_B, next_B[:, None], mode)

    def _ended(self, part: str) -> None:
        if self.on_part is not None:
            self.on_part(part)

    def _tree(
        self, slots_B: Tensor, shape: TreeShape, *, max_kv_len: int, mode: SamplingMode
    ) -> Tree:
        if not shape.depth:
            return chain_tree(self.state.pending_S.index_select(0, slots_B)[:, None])
        assert self.proposer is not None, "a speculative round needs a draft"
        return self.proposer.draft_tree(slots_B, shape, max_kv_len=max_kv_len, mode=mode)

    def _accept(
        self, slots_B: Tensor, tree: Tree, chosen_T: Tensor, shape: TreeShape
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(path_BE, emitted_BE, num_accepted_B); a slot's limit of drafted tokens cuts the walk:
        the choice at the last node kept is then the bonus token, as at any other node."""
        chosen_BN = chosen_T.view(-1, shape.num_nodes)
        if self.simulated is not None and shape.depth:
            accepted = self.simulated.accept(
                self.state, slots_B, tree, chosen_BN, depth=shape.depth
            )
        else:
            accepted = kernels.walk_tree(
                tree.token_BN, tree.parent_BN, chosen_BN, depth=shape.depth
            )
        path_BE, emitted_BE, num_accepted_B = accepted
        max_draft_B = self.state.max_draft_S.index_select(0, slots_B)
        return path_BE, emitted_BE, torch.minimum(num_accepted_B, max_draft_B)

    def _commit(
        self,
        slots_B: Tensor,
        length_B: Tensor,
        path_BE: Tensor,
        emitted_BE: Tensor,
        num_emitted_B: Tensor,
    ) -> None:
        """Copy the accepted path's rows from scratch to pages L .. L + num_emitted - 1, and move
        length and pending token."""
        state, pool = self.state, self.backend.pool
        step_E = torch.arange(path_BE.shape[1], device=path_BE.device)
        valid_BE = step_E < num_emitted_B[:, None]
        index_BE = torch.where(valid_BE, length_B[:, None] + step_E, 0)
        row_BE = state.rows(slots_B[:, None], index_BE, pool.page_size)
        row_BE = torch.where(valid_BE, row_BE, pool.trash_row)
        scratch_B1 = self.backend.scratch_rows(slots_B, step_E[:1])
        pool.copy_rows((scratch_B1 + path_BE).reshape(-1), row_BE.reshape(-1))
        last_B1 = (num_emitted_B - 1).clamp(min=0)[:, None]
        pending_B = emitted_BE.gather(1, last_B1)[:, 0]
        state.length_S.index_copy_(0, slots_B, length_B + num_emitted_B)
        kept_B = state.pending_S.index_select(0, slots_B)
        pending_B = torch.where(num_emitted_B > 0, pending_B, kept_B)
        state.pending_S.index_copy_(0, slots_B, pending_B)

    def _extend(
        self,
        slots_B: Tensor,
        length_B: Tensor,
        emitted_BE: Tensor,
        features_TF: Tensor,
        num_emitted_B: Tensor,
    ) -> None:
        """The draft's entries of the committed path: pairs (emitted j, features of node j)."""
        assert self.proposer is not None
        num_steps = emitted_BE.shape[1]
        step_E = torch.arange(num_steps, device=emitted_BE.device)
        first_B = torch.arange(len(slots_B), device=slots_B.device) * num_steps
        self.proposer.extend(
            emitted_BE.reshape(-1),
            features_TF,
            (length_B[:, None] + step_E).reshape(-1),
            slots_T=slots_B[:, None].expand(-1, num_steps).reshape(-1),
            valid_T=(step_E < num_emitted_B[:, None]).reshape(-1),
            slots_B=slots_B,
            last_B=first_B + (num_emitted_B - 1).clamp(min=0),
        )


def _with_logprobs(
    packed: Tensor, logits_TV: Tensor, row_T: Tensor, emitted_BE: Tensor, mode: SamplingMode
) -> RoundOutput:
    """Add log-probabilities of the emitted tokens, from the rows that chose them."""
    if mode.num_logprobs is None:
        return RoundOutput(packed)
    ids, values = kernels.token_logprobs(
        logits_TV.index_select(0, row_T), emitted_BE.reshape(-1), mode.num_logprobs
    )
    shape = (*emitted_BE.shape, ids.shape[1])
    return RoundOutput(packed, ids.view(shape), values.view(shape))
