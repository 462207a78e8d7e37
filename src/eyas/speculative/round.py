"""One round: draft -> verify -> accept -> commit -> extend; and the prefill, which ends the same.

Plain decoding is the round with the root alone (D1). Everything here has static shapes and lies on
the device: no host synchronisation, so that a round can be captured (D6, D15). What happens
between the models' forwards is `steps`.

Shape suffixes: B requests, N tree nodes, E emitted tokens at most (depth + 1), T rows,
V vocabulary, F captured features.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eyas import kernels
from eyas.config import TreeShape
from eyas.contract.target import GivenRows, LocalLogits, Target
from eyas.kernels import SamplingMode
from eyas.speculative.backend import Backend
from eyas.speculative.proposer import Proposer
from eyas.speculative.simulate import SimulatedAcceptance
from eyas.speculative.state import SlotState
from eyas.speculative.steps import RoundStart, steps_for
from eyas.speculative.tree import Tree
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


@dataclasses.dataclass(frozen=True)
class Drafted:
    """What the halves of a round share: where its slots stand, and the trees to verify."""

    start: RoundStart
    tree: Tree


@dataclasses.dataclass(frozen=True)
class _ChunkInputs:
    """Prompt chunks on the device, int64. last_B: each chunk's last row; final_B: 1 where it ends
    the prompt; known_B: else the token after it."""

    slots_B: Tensor
    last_B: Tensor
    end_B: Tensor
    final_B: Tensor
    known_B: Tensor
    tokens_T: Tensor
    position_T: Tensor
    slots_T: Tensor


def _on_device(chunks: Sequence[PrefillChunk], device: torch.device) -> _ChunkInputs:
    """All that the host knows of the chunks, in one copy."""
    sizes = [len(c.token_ids) for c in chunks]
    num_chunks, num_rows = len(chunks), sum(sizes)
    rows = [last - 1 for last in itertools.accumulate(sizes)]
    host = torch.empty(
        5 * num_chunks + 3 * num_rows, dtype=torch.int64, pin_memory=device.type == "cuda"
    )
    by_chunk = (
        [c.slot for c in chunks],
        rows,
        [c.end for c in chunks],
        [int(c.next_token is None) for c in chunks],
        [c.next_token or 0 for c in chunks],
    )
    host[: 5 * num_chunks] = torch.tensor(by_chunk).view(-1)
    lists = host[5 * num_chunks :].view(3, num_rows)
    row = 0
    for chunk, size in zip(chunks, sizes, strict=True):
        lists[0, row : row + size] = torch.tensor(chunk.token_ids)
        torch.arange(chunk.start, chunk.end, out=lists[1, row : row + size])
        lists[2, row : row + size] = chunk.slot
        row += size
    moved = host.to(device, non_blocking=True)
    head = moved[: 5 * num_chunks].view(5, num_chunks)
    return _ChunkInputs(*head.unbind(), *moved[5 * num_chunks :].view(3, num_rows).unbind())


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
        self.proposer, self.simulated = proposer, simulated
        self.steps = steps_for(state)
        self.sampler = self.steps.sampler
        # Told the name of each part of a round that has just ended; for hosts that time them.
        self.on_part: Callable[[str], None] | None = None

    def round(
        self, slots_B: Tensor, shape: TreeShape, *, max_kv_len: int, mode: SamplingMode
    ) -> RoundOutput:
        """Run one round for the slots (int64 [B], padding repeats the trash slot).

        max_kv_len: no slot's length is above it. mode: what the requests' sampling needs.
        A speculative shape needs `prime` first if the last round of a slot was a plain one.
        """
        drafted = self.draft(slots_B, shape, max_kv_len=max_kv_len, mode=mode)
        return self.verify(drafted, shape, max_kv_len=max_kv_len, mode=mode)

    def draft(
        self, slots_B: Tensor, shape: TreeShape, *, max_kv_len: int, mode: SamplingMode
    ) -> Drafted:
        """The first half of a round; a grammar's masks would be made between the two (D6)."""
        start = self.steps.begin(slots_B, shape)
        tree = self._tree(start, shape, max_kv_len=max_kv_len, mode=mode)
        self._ended("draft")
        return Drafted(start, tree)

    def verify(
        self, drafted: Drafted, shape: TreeShape, *, max_kv_len: int, mode: SamplingMode
    ) -> RoundOutput:
        """The second half: verify, accept, commit and extend."""
        steps, start, tree = self.steps, drafted.start, drafted.tree
        slots_B = start.slots_B
        plan = self.backend.plan_tree(
            page_table_BP=start.page_table_BP,
            slots_B=slots_B,
            first_index=0,
            end_index_B=start.length_B,
            visible_BQN=tree.visible_BNN,
            first_node=0,
            max_kv_len=max_kv_len,
        )
        position_T = tree.positions(start.length_B).reshape(-1)
        output = self.target.forward(tree.token_BN.reshape(-1), position_T, plan)
        logits = self.target.compute_local_logits(output.hidden_TH)
        chosen_T = steps.choose(logits, slots_B, position_T, tree, mode)
        settled = steps.settle(
            start,
            tree,
            chosen_T,
            shape=shape,
            backend=self.backend,
            mode=mode,
            simulated=self.simulated,
        )
        self.backend.pool.copy_rows(settled.source_T, settled.destination_T)
        self._ended("verify")
        if self.proposer is not None:
            assert output.features_TF is not None
            features_TF = steps.features(output.features_TF, settled, shape)
            hidden_BH = self.proposer.store(
                settled.emitted_BE.reshape(-1), features_TF, settled.entries
            )
            if shape.depth:
                self.proposer.prime(
                    slots_B,
                    max_kv_len=max_kv_len + shape.depth + 1,
                    mode=mode,
                    pairs=steps.last_pairs(start, settled, hidden_BH),
                )
        self._ended("draft")
        return _with_logprobs(settled.packed, logits, settled.row_T, settled.emitted_BE, mode)

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
        state, inputs = self.state, _on_device(chunks, self.state.device)
        slots_B, last_B, end_B = inputs.slots_B, inputs.last_B, inputs.end_B
        plan = self.backend.plan_prefill(
            page_table_BP=state.page_table_SP.index_select(0, slots_B),
            chunks=[(c.start, c.end) for c in chunks],
            device=state.device,
        )
        output = self.target.forward(inputs.tokens_T, inputs.position_T, plan, given)
        logits = self.target.compute_local_logits(output.hidden_TH.index_select(0, last_B))
        chosen_B = self.steps.choose_first(logits, slots_B, end_B, mode)
        final_B = inputs.final_B != 0
        next_B = torch.where(final_B, chosen_B, inputs.known_B)
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
                inputs.tokens_T.roll(-1).index_copy(0, last_B, next_B),
                output.features_TF,
                inputs.position_T,
                slots_T=inputs.slots_T,
                slots_B=slots_B,
                last_B=last_B,
            )
            if prime:
                longest = max(c.end for c in chunks) + 1
                self.proposer.prime(slots_B, max_kv_len=longest, mode=mode)
        extra = torch.stack((num_emitted_B, finish_B, num_accepted_B), dim=1)
        packed = torch.cat((next_B[:, None], extra), dim=1)
        rows_B = torch.arange(len(chunks), device=state.device)
        return _with_logprobs(packed, logits, rows_B, next_B[:, None], mode)

    def _ended(self, part: str) -> None:
        if self.on_part is not None:
            self.on_part(part)

    def _tree(
        self, start: RoundStart, shape: TreeShape, *, max_kv_len: int, mode: SamplingMode
    ) -> Tree:
        if not shape.depth:
            return self.steps.root(start)
        assert self.proposer is not None, "a speculative round needs a draft"
        return self.proposer.draft_tree(
            start.slots_B, shape, max_kv_len=max_kv_len, mode=mode, start=start
        )


def _with_logprobs(
    packed: Tensor, logits: LocalLogits, row_T: Tensor, emitted_BE: Tensor, mode: SamplingMode
) -> RoundOutput:
    """Add log-probabilities of the emitted tokens, from the rows that chose them."""
    if mode.num_logprobs is None:
        return RoundOutput(packed)
    ids, values = kernels.token_logprobs(
        logits.whole_TV.index_select(0, row_T), emitted_BE.reshape(-1), mode.num_logprobs
    )
    shape = (*emitted_BE.shape, ids.shape[1])
    return RoundOutput(packed, ids.view(shape), values.view(shape))
