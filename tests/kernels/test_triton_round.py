"""The round's Triton kernels by themselves: noise, choices, proposals, copies."""

import pytest
import torch
from torch import Tensor

from eyas.kernels import reference

pytestmark = pytest.mark.interpreter

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 12345, 2**31, 2**32 + 7]


def random_logits(num_rows: int, vocab_size: int, *, seed: int, ties: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    return logits.round() if ties else logits


def test_the_noise_is_the_references() -> None:
    from eyas.kernels import triton_sampling

    generator = torch.Generator().manual_seed(0)
    seed_R = torch.tensor(SEEDS)
    position_R = torch.tensor([0, 1, 2, 77, 4095, 2**20, 131071, 9])
    token_V = torch.randint(0, 2**31 - 1, (3000,), generator=generator)
    noise_RV = triton_sampling.gumbel_noise(seed_R, position_R, token_V)
    want_RV = reference.gumbel_noise(seed_R, position_R, token_V)
    torch.testing.assert_close(noise_RV, want_RV, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("noise", [False, True], ids=["greedy", "sampled"])
def test_the_choice_is_the_references(dtype: torch.dtype, ties: bool, noise: bool) -> None:
    """Three slots of two rows over several blocks; the lowest id of equals, as argmax."""
    from eyas.kernels import triton_sampling

    logits_TV = random_logits(6, 2500, seed=int(ties), ties=ties).to(dtype)
    logits_TV[5, 1200:] = float("-inf")
    slots_B, temperature_S = torch.tensor([2, 0, 3]), torch.tensor([0.7, 9.0, 0.0, 1.3])
    seed_S, position_T = torch.tensor([5, 6, 7, -8]), torch.tensor([3, 4, 60, 61, 0, 9])
    chosen_T = triton_sampling.choose(
        logits_TV,
        slots_B,
        position_T,
        offset=1,
        temperature_S=temperature_S,
        seed_S=seed_S,
        min_p_S=torch.zeros(4),
        noise=noise,
    )
    slots_T = slots_B.repeat_interleave(2)
    noise_TV = None
    if noise:
        noise_TV = triton_sampling.gumbel_noise(seed_S[slots_T], position_T + 1, torch.arange(2500))
    want_T = reference.choose_tokens(logits_TV, temperature_S[slots_T], noise_TV)
    assert chosen_T.tolist() == want_T.tolist()


def test_a_choice_among_odd_values_is_argmaxs() -> None:
    """Zeros of both signs are equal, NaN is as high as inf, and a row of -inf has a token too."""
    from eyas.kernels import triton_sampling

    nan, inf = float("nan"), float("inf")
    logits_TV = torch.full((6, 1500), -1.0)
    logits_TV[0, [3, 9]] = torch.tensor([-0.0, 0.0])
    logits_TV[1, [1400, 1401]] = torch.tensor([nan, inf])
    logits_TV[2] = -inf
    logits_TV[3] = nan
    logits_TV[4, [1499, 1024]] = 5.0
    logits_TV[5, 700] = -nan
    zeros = torch.zeros(6, dtype=torch.int64)
    chosen_T = triton_sampling.choose(
        logits_TV,
        torch.arange(6),
        zeros,
        offset=1,
        temperature_S=torch.zeros(6),
        seed_S=zeros,
        min_p_S=torch.zeros(6),
        noise=False,
    )
    assert chosen_T.tolist() == logits_TV.argmax(1).tolist()


def proposed_scores(
    logits_TV: Tensor, slots_T: Tensor, position_T: Tensor, ids_V: Tensor, settings: dict
) -> Tensor:
    """The scores that proposals are ranked by, with the kernels' own noise."""
    from eyas.kernels import triton_sampling

    temperature_T1 = settings["temperature_S"][slots_T][:, None]
    noise_TV = triton_sampling.gumbel_noise(settings["seed_S"][slots_T], position_T + 2, ids_V)
    warm_TV = logits_TV.float() / torch.where(temperature_T1 > 0, temperature_T1, 1.0) + noise_TV
    return torch.where(temperature_T1 > 0, warm_TV, logits_TV.float())


@pytest.mark.parametrize("topk", [1, 3, 8, 16])
def test_proposals_are_the_best_of_the_draft(topk: int) -> None:
    """With several blocks, the last of which has fewer tokens than candidates are asked for."""
    from eyas.kernels import triton_draft

    vocab_size = 2 * 1024 + 5
    logits_TV = random_logits(3, vocab_size, seed=topk).to(torch.bfloat16)
    ids_V = torch.arange(vocab_size) * 3 + 1
    slots_T, position_T = torch.tensor([1, 0, 2]), torch.tensor([10, 20, 30])
    settings = {
        "temperature_S": torch.tensor([1.0, 0.5, 0.8]),
        "seed_S": torch.tensor([5, -6, 7]),
    }
    proposals = triton_draft.propose(
        logits_TV, slots_T, position_T, ids_V, topk=topk, noise=True, **settings
    )
    token_SK = torch.full((3, topk), -1)
    score_SK = torch.full((3, topk), 9.0)
    hidden_TH, draft_hidden_SH = torch.randn(3, 1100), torch.zeros(3, 1100)
    triton_draft.store_first_level(
        proposals,
        slots_T,
        ids_V,
        hidden_TH,
        candidate_token_SK=token_SK,
        candidate_score_SK=score_SK,
        draft_hidden_SH=draft_hidden_SH,
    )
    scores_TV = proposed_scores(logits_TV, slots_T, position_T, ids_V, settings)
    best = scores_TV.topk(topk)
    assert torch.equal(token_SK[slots_T], ids_V[best.indices])
    want_TK = best.values - scores_TV.logsumexp(-1, keepdim=True)
    want_TK = torch.zeros(3, 1) if topk == 1 else want_TK
    torch.testing.assert_close(score_SK[slots_T], want_TK, atol=2e-5, rtol=1e-5)
    assert torch.equal(draft_hidden_SH[slots_T], hidden_TH)


def test_a_chain_takes_the_best_of_each_row() -> None:
    from eyas.kernels import triton_draft

    logits_TV = random_logits(3, 1500, seed=4, ties=True)
    ids_V, slots_T = torch.arange(1500) + 7, torch.tensor([0, 2, 1])
    settings = {"temperature_S": torch.zeros(3), "seed_S": torch.zeros(3, dtype=torch.int64)}
    proposals = triton_draft.propose(
        logits_TV, slots_T, slots_T, ids_V, topk=1, noise=True, **settings
    )
    token_BN = torch.zeros(3, 5, dtype=torch.int64)
    next_B = triton_draft.extend_chain(proposals, ids_V, token_BN, column=3)
    assert torch.equal(next_B, logits_TV.argmax(1) + 7)
    assert torch.equal(token_BN[:, 3], next_B)
    assert not token_BN[:, [0, 1, 2, 4]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_size", [6, 4, 0], ids=["equal", "narrower", "in the key"])
def test_rows_are_copied_in_all_layers(dtype: torch.dtype, v_size: int) -> None:
    from eyas.kernels import triton_round

    k_LRKD = torch.randn(3, 12, 2, 6).to(dtype)
    v_LRKD = torch.randn(3, 12, 2, v_size).to(dtype)
    source_T, destination_T = torch.tensor([9, 8, 11, 7]), torch.tensor([1, 4, 2, 4])
    pools = [k_LRKD, v_LRKD][: 1 + bool(v_size)]
    want = [pool.clone() for pool in pools]
    for pool in want:
        reference.copy_kv_rows(pool, source_T[[0, 2]], destination_T[[0, 2]])
    triton_round.copy_rows(pools, source_T, destination_T, trash_row=4)
    for pool, expected in zip(pools, want, strict=True):
        assert torch.equal(pool, expected)
