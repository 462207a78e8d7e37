"""The scripted draft: what it proposes, and to whom."""

import pytest
import torch
from fixtures.tiny import fresh_backend
from torch import Tensor

from eyas.attention.torch_backend import TorchAttention
from eyas.models.scripted import ScriptedDraft

VOCAB = 10


def plan() -> TorchAttention:
    draft = ScriptedDraft([], vocab_size=VOCAB, num_slots=1)
    backend = fresh_backend(draft.kv_layout, num_pages=2, page_size=4)
    return backend.plan_write(torch.tensor([8, 9]))


def proposals(draft: ScriptedDraft, positions: list[int], slots: list[int]) -> Tensor:
    count = len(positions)
    zeros = torch.zeros(count, 1)
    out = draft.forward(
        torch.zeros(count, dtype=torch.int64),
        zeros,
        torch.tensor(positions),
        torch.tensor(slots),
        plan(),
    )
    assert torch.equal(out.hidden_TH, zeros)
    return out.logits_TV


def test_the_pair_at_t_proposes_token_t_plus_2() -> None:
    draft = ScriptedDraft([[1, 2, 3, 4, 5], [1, 7, 8, 9, 6]], vocab_size=VOCAB, num_slots=3)
    draft.bind(0, [1, 2])
    draft.bind(2, [1, 7])
    assert proposals(draft, [0, 1], [0, 0]).argmax(1).tolist() == [3, 4]
    assert proposals(draft, [2, 0], [0, 2]).argmax(1).tolist() == [5, 8]


def test_runners_up_are_the_next_ids_in_order() -> None:
    draft = ScriptedDraft([[1, 2, 8]], vocab_size=VOCAB, num_slots=1)
    draft.bind(0, [1])
    logits_TV = proposals(draft, [0, 0], [0, 0])
    assert logits_TV[0].topk(5).indices.tolist() == [8, 9, 0, 1, 2]
    # Far enough apart that no Gumbel noise changes the order of the first few.
    assert (logits_TV[0].topk(5).values.diff() < -50).all()


@pytest.mark.parametrize("prompt", [[5], [1, 3], [1, 2, 8, 0]])
def test_without_a_script_token_0_is_proposed(prompt: list[int]) -> None:
    draft = ScriptedDraft([[1, 2, 8]], vocab_size=VOCAB, num_slots=1)
    draft.bind(0, [1, 2])
    draft.bind(0, prompt)  # the slot's former script is gone
    assert proposals(draft, [0, 1], [0, 0]).argmax(1).tolist() == [0, 0]


def test_past_the_end_token_0_is_proposed_at_any_position() -> None:
    draft = ScriptedDraft([[1, 2, 8]], vocab_size=VOCAB, num_slots=1)
    draft.bind(0, [1])
    assert proposals(draft, [1, 100_000], [0, 0]).argmax(1).tolist() == [0, 0]


def test_the_first_sequence_that_fits_counts() -> None:
    draft = ScriptedDraft([[1, 2, 3], [1, 2, 4]], vocab_size=VOCAB, num_slots=1)
    draft.bind(0, [1, 2])
    assert proposals(draft, [0, 0], [0, 0]).argmax(1).tolist() == [3, 3]


def test_stores_token_and_position() -> None:
    draft = ScriptedDraft([], vocab_size=VOCAB, num_slots=1)
    backend = fresh_backend(draft.kv_layout, num_pages=2, page_size=4)
    hidden_TH = draft.combine(torch.randn(2, 32))
    assert torch.equal(hidden_TH, torch.zeros(2, 1))
    tokens_T, position_T = torch.tensor([6, 3]), torch.tensor([4, 5])
    attention = backend.plan_write(torch.tensor([12, 13]))
    draft.write_kv(tokens_T, hidden_TH, position_T, attention)
    assert backend.pool.k_LRKD[0, [12, 13]].flatten().tolist() == [6, 3]
    assert backend.pool.v_LRKD[0, [12, 13]].flatten().tolist() == [4, 5]
    assert draft.target_ids_V.tolist() == list(range(VOCAB))
    assert (draft.draft_vocab_size, draft.hidden_size, draft.boundaries) == (VOCAB, 1, (0,))
