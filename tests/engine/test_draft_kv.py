"""After every round the caches hold what a fresh prefill of the same text would put there.

Trap 10 of the reference: draft rows made from draft states must not stay. The pools start as NaN,
so that an entry which was never written, or is read before, cannot pass.
"""

import dataclasses

import pytest
import torch
from fixtures.slow_draft import SlowDraft
from fixtures.tiny import (
    count_preemptions,
    full_forward,
    make_engine,
    scripted,
    tiny_draft_and_weights,
    worker_shape,
)
from fixtures.world import World, world
from torch import Tensor

from eyas.cache.pool import KVPool
from eyas.config import PLAIN, TreeShape
from eyas.engine.engine import Engine
from eyas.models.eagle3 import Eagle3Draft
from eyas.scheduler.scheduler import Phase, Request

SHAPES = {"plain": PLAIN, "chain": TreeShape(3, 1, 4), "tree": TreeShape(4, 3, 12)}
CHOSEN = (1, 4, 9, 13, 16)  # prompts of 2, 7, 24, 47 and 64 tokens, greedy and sampled
NUM_NEW = 30


@dataclasses.dataclass(frozen=True)
class Expected:
    """One text's states: target [L, T, K, D], draft [T, K, D] by pair, s = fc(features) [T, H]."""

    target_k: Tensor
    target_v: Tensor
    draft_k: Tensor
    draft_v: Tensor
    combined: Tensor


def expected(w: World, draft: Eagle3Draft, slow: SlowDraft, text: list[int]) -> Expected:
    """From one pass over the whole text, and the draft's pairs row by row."""
    output, pool = full_forward(w.target, text, draft.boundaries)
    assert output.features_TF is not None
    states = [slow.combine(features) for features in output.features_TF]
    pairs = zip(text[1:], states, strict=False)
    entries = [slow.entry(token, state, t) for t, (token, state) in enumerate(pairs)]
    first = 2 * len(text)
    return Expected(
        target_k=pool.k_LRKD[:, first : first + len(text)],
        target_v=pool.v_LRKD[:, first : first + len(text)],
        draft_k=torch.stack([e.key for e in entries]).float(),
        draft_v=torch.stack([e.value for e in entries]).float(),
        combined=torch.stack(states).float(),
    )


def cached(pool: KVPool, engine: Engine, slot: int, index: range) -> tuple[Tensor, Tensor]:
    """Keys and values [L, T, K, D] of a slot's cache indices, found through its page table."""
    pages = engine.worker.state.page_table_SP[slot].tolist()
    rows = [pages[i // pool.page_size] * pool.page_size + i % pool.page_size for i in index]
    return pool.k_LRKD[:, rows].cpu(), pool.v_LRKD[:, rows].cpu()


def check_caches(engine: Engine, request: Request, want: Expected) -> int:
    """Compare a request's caches between two steps; returns its committed length."""
    worker, slot = engine.worker, request.slot
    assert slot is not None and worker.draft_pool is not None
    length = int(worker.state.length_S[slot])
    assert length == request.num_tokens - 1  # all but the pending token
    assert int(worker.state.pending_S[slot]) == request.token_ids[-1]
    close = {"atol": 2e-4, "rtol": 1e-4}
    key, value = cached(worker.target_pool, engine, slot, range(length))
    torch.testing.assert_close(key, want.target_k[:, :length], **close)
    torch.testing.assert_close(value, want.target_v[:, :length], **close)
    key, value = cached(worker.draft_pool, engine, slot, range(1, length + 1))
    torch.testing.assert_close(key[0], want.draft_k[:length], **close)
    torch.testing.assert_close(value[0], want.draft_v[:length], **close)
    torch.testing.assert_close(
        worker.state.draft_input_SH[slot].cpu(), want.combined[length - 1], **close
    )
    return length


def check_every_round(
    w: World, engine: Engine, draft: Eagle3Draft, slow: SlowDraft
) -> list[Request]:
    """Run the chosen prompts and compare all of them after every step."""
    wanted, requests = {}, []
    for index in CHOSEN:
        text = w.prompts[index] + w.plain[index][:NUM_NEW]
        wanted[str(index)] = expected(w, draft, slow, text)
        engine.add(str(index), w.prompts[index], w.limited(NUM_NEW)[index])
        requests.append(engine.requests[str(index)])
    lengths = set()
    while engine.has_work:
        engine.step()
        for request in requests:
            if request.phase is Phase.RUNNING:
                lengths.add(check_caches(engine, request, wanted[request.request_id]))
    assert len(lengths) > 60
    for request, index in zip(requests, CHOSEN, strict=True):
        assert request.output_token_ids == w.plain[index][:NUM_NEW]
    return requests


@pytest.fixture(scope="module")
def w() -> World:
    return world()


@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_caches_equal_a_fresh_prefill_after_every_round(w: World, shape: str) -> None:
    engine = make_engine(w.target, w.draft, worker_shape(SHAPES[shape]))
    check_every_round(w, engine, w.draft, w.slow_draft)


@pytest.mark.parametrize("page_size", [1, 2])
def test_with_the_smallest_pages(w: World, page_size: int) -> None:
    sizes = {"page_size": page_size, "num_pages": 1200 // page_size}
    engine = make_engine(w.target, w.draft, worker_shape(SHAPES["tree"], **sizes))
    check_every_round(w, engine, w.draft, w.slow_draft)


@pytest.mark.parametrize("chunk_tokens", [1, 7])
def test_with_chunked_prefill(w: World, chunk_tokens: int) -> None:
    """A chunk's last pair takes the prompt's next token, not a sampled one (trap 13)."""
    shape = worker_shape(SHAPES["tree"])
    engine = make_engine(w.target, w.draft, shape, chunk_tokens=chunk_tokens)
    check_every_round(w, engine, w.draft, w.slow_draft)


def test_after_preemption(w: World) -> None:
    engine = make_engine(w.target, w.draft, worker_shape(SHAPES["chain"], num_pages=13))
    victims = count_preemptions(engine)
    check_every_round(w, engine, w.draft, w.slow_draft)
    assert victims


@pytest.mark.parametrize("page_size", [4, 16])
def test_with_cached_prefixes(w: World, page_size: int) -> None:
    """Three requests whose beginnings others have left behind: the entry that links the cached
    pages to what follows is made from the page's last state (D7; sglang#19796 is the NaN)."""
    sizes = {"page_size": page_size, "num_pages": 1200 // page_size}
    engine = make_engine(w.target, w.draft, worker_shape(SHAPES["tree"], **sizes))
    hits = [index for index in CHOSEN if len(w.prompts[index]) > 16]
    for index in hits:  # the same beginnings, another token at the end
        prompt = w.prompts[index]
        engine.add(f"before {index}", [*prompt[:-1], 63 - prompt[-1]], w.limited(1)[index])
    while engine.has_work:
        engine.step()
    requests = check_every_round(w, engine, w.draft, w.slow_draft)
    for index, request in zip(CHOSEN, requests, strict=True):
        expected = (len(w.prompts[index]) - 1) // page_size * page_size if index in hits else 0
        assert request.num_cached_tokens == expected
    assert len(hits) == 3


def test_of_a_modern_draft(w: World) -> None:
    """The flags that decide what the cached rows are made of."""
    config = dataclasses.replace(
        w.draft.config, fc_norm=True, norm_output=True, norm_before_residual=True
    )
    draft, weights = tiny_draft_and_weights(w.target, config, seed=4)
    engine = make_engine(w.target, draft, worker_shape(SHAPES["chain"]))
    check_every_round(w, engine, draft, SlowDraft(config, weights))


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_pairs_are_the_committed_tokens(w: World, shape: str, run_ahead: int) -> None:
    """A scripted draft stores (token, position): index t + 1 holds (x_{t+1}, t) for all t < L.

    Looked at right after each launch, before the host has read it (on_round).
    """
    text = w.texts[4]
    script = [token if i % 3 else (token + 7) % 64 for i, token in enumerate(text)]
    script[: len(w.prompts[4])] = w.prompts[4]
    engine = make_engine(
        w.target, scripted([script]), worker_shape(SHAPES[shape]), run_ahead=run_ahead
    )
    engine.add("x", w.prompts[4], w.limited(NUM_NEW)[4])
    slot_lengths = []

    def look() -> None:
        pool = engine.worker.draft_pool
        assert pool is not None
        length = int(engine.worker.state.length_S[0])
        if engine.worker.state.active_S[0]:
            key, value = cached(pool, engine, 0, range(1, length + 1))
            assert key.view(-1).tolist() == text[1 : length + 1]
            assert value.view(-1).tolist() == list(range(length))
            slot_lengths.append(length)

    slots = engine.scheduler._free_slots
    assert slots[-1] == 0
    engine.on_round = look
    while engine.has_work:
        engine.step()
    assert len(slot_lengths) > 5 and slot_lengths == sorted(set(slot_lengths))
