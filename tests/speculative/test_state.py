"""What entering and leaving a slot writes."""

import pytest
import torch

from eyas.cache.pool import NULL_PAGE
from eyas.kernels import SamplingMode
from eyas.speculative.state import MAX_STOP_IDS, SlotSettings, SlotState, sampling_mode
from eyas.types import SamplingParams

PLAIN = SamplingParams(temperature=0)


def state() -> SlotState:
    return SlotState(
        num_slots=4,
        max_pages=5,
        vocab_size=12,
        draft_hidden_size=3,
        draft_dtype=torch.bfloat16,
        topk=2,
        device="cpu",
    )


def settings(params: SamplingParams = PLAIN, **changes: object) -> SlotSettings:
    arguments: dict[str, object] = {
        "remaining": 9,
        "seed": -(2**63),
        "stop_ids": [7, 3],
        "prompt_token_ids": [1, 2, 2],
    }
    return SlotSettings(params, **(arguments | changes))  # type: ignore[arg-type]


def test_sizes_and_the_trash_slot() -> None:
    made = state()
    assert made.trash_slot == 3
    assert made.page_table_SP.shape == (4, 5) and made.page_table_SP.eq(NULL_PAGE).all()
    assert made.draft_input_SH.shape == made.draft_hidden_SH.shape == (4, 3)
    assert made.draft_input_SH.dtype == torch.bfloat16
    assert made.candidate_token_SK.shape == (4, 2)
    assert not made.active_S.any()


def test_admission_writes_one_slot_only() -> None:
    made = state()
    params = SamplingParams(
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        min_p=0.25,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        min_tokens=2,
        logit_bias={5: 1.0, 2: -3.0},
    )
    others = [0, 2, 3]
    tensors = {n: v for n, v in vars(made).items() if isinstance(v, torch.Tensor)}
    before = {name: value[others].clone() for name, value in tensors.items()}
    made.admit(1, settings(params, output_token_ids=[4, 4, 6]))
    for name, value in tensors.items():
        assert torch.equal(value[others], before[name]), name
    numbers = {
        "length_S": 0, "remaining_S": 9, "emitted_S": 3, "active_S": False, "seed_S": -(2**63),
        "temperature_S": 0.5, "top_k_S": 4, "top_p_S": 0.75, "min_p_S": 0.25, "presence_S": 1.5,
        "frequency_S": -0.5, "repetition_S": 1.25, "min_tokens_S": 2,
    }  # fmt: skip
    for name, value in numbers.items():
        assert getattr(made, name)[1].item() == value, name
    assert made.stop_ids_SM[1].tolist() == [7, 3] + [-1] * (MAX_STOP_IDS - 2)
    assert made.bias_id_SA[1, :3].tolist() == [5, 2, 0]
    assert made.bias_value_SA[1, :3].tolist() == [1.0, -3.0, 0.0]
    assert made.output_count_SV[1].tolist() == [0, 0, 0, 0, 2, 0, 1, 0, 0, 0, 0, 0]
    assert made.prompt_seen_SV[1].nonzero().view(-1).tolist() == [1, 2]


def test_nothing_of_the_former_request_is_left() -> None:
    """A slot that had every option, then a request with none: as if the slot were new."""
    used, new = state(), state()
    everything = SamplingParams(
        temperature=2.0, top_k=1, top_p=0.1, min_p=0.9, presence_penalty=2.0,
        repetition_penalty=3.0, min_tokens=5, logit_bias={1: 9.0, 4: 2.0}, speculation=False,
    )  # fmt: skip
    used.admit(1, settings(everything, stop_ids=range(MAX_STOP_IDS), output_token_ids=[1]))
    used.set_pages({1: [5, 6, 7, 8, 9]})
    used.active_S[1], used.length_S[1] = True, 7
    used.release(1)
    assert not used.active_S[1]
    for made in (used, new):
        made.admit(1, settings())
        made.set_pages({1: [4]})
    for name, value in vars(new).items():
        # Counts are read only where a request has penalties, which starts them afresh.
        if isinstance(value, torch.Tensor) and name not in ("output_count_SV", "prompt_seen_SV"):
            assert torch.equal(getattr(used, name), value), name
    penalty = settings(SamplingParams(presence_penalty=1.0))
    for made in (used, new):
        made.admit(1, penalty)
    assert torch.equal(used.output_count_SV, new.output_count_SV)
    assert torch.equal(used.prompt_seen_SV, new.prompt_seen_SV)


def test_rows_of_indices_through_the_page_table() -> None:
    made = state()
    made.set_pages({2: [9, 4]})
    slots, index = torch.tensor([2, 2, 2]), torch.tensor([0, 2, 5])
    assert made.pages(slots, index, 3).tolist() == [9, 9, 4]
    assert made.rows(slots, index, 3).tolist() == [27, 29, 14]
    grid = made.rows(torch.tensor([[2]]), torch.tensor([[3, 4]]), 3)
    assert grid.tolist() == [[12, 13]]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (PLAIN, SamplingMode()),
        (SamplingParams(), SamplingMode(noise=True)),
        (SamplingParams(top_k=3), SamplingMode(noise=True, truncate=True)),
        (SamplingParams(top_p=0.5), SamplingMode(noise=True, truncate=True)),
        (SamplingParams(min_p=0.5), SamplingMode(noise=True, truncate=True)),
        # Truncation never cuts the best token, so a greedy choice does not need it.
        (SamplingParams(temperature=0, top_p=0.5), SamplingMode()),
        (SamplingParams(temperature=0, repetition_penalty=0.5), SamplingMode(penalize=True)),
        (SamplingParams(temperature=0, presence_penalty=-1), SamplingMode(penalize=True)),
        (SamplingParams(temperature=0, frequency_penalty=1), SamplingMode(penalize=True)),
        (SamplingParams(temperature=0, logit_bias={1: 1.0}), SamplingMode(bias=True)),
        (SamplingParams(temperature=0, min_tokens=1), SamplingMode(bias=True)),
        (SamplingParams(temperature=0, logprobs=0), SamplingMode(num_logprobs=0)),
    ],
)
def test_a_request_asks_for_no_more_than_it_needs(
    params: SamplingParams, expected: SamplingMode
) -> None:
    assert sampling_mode(params) == expected


def test_modes_of_a_batch_are_joined() -> None:
    one, two = SamplingMode(noise=True, num_logprobs=0), SamplingMode(bias=True, num_logprobs=3)
    assert one | two == SamplingMode(noise=True, bias=True, num_logprobs=3)
    assert SamplingMode() | SamplingMode() == SamplingMode()
    assert (SamplingMode() | one).num_logprobs == 0
