"""Prefix hits: as many with speculation as without, and nothing tells a hit from a fresh prefill.

The pools start as NaN, so that a row or a page's last state which was never written shows.
"""

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from fixtures.sampling_world import (
    SHAPES,
    TREE,
    Answer,
    ask,
    caches,
    cases,
    collect,
    distinct_prompts,
    fresh_caches,
)
from fixtures.tiny import (
    VOCAB,
    assert_idle,
    draft_config,
    llama_config,
    make_engine,
    scripted,
    tiny_draft,
    tiny_target,
    worker_shape,
)
from fixtures.world import World, top2_gap, world

from eyas.config import PLAIN, TreeShape
from eyas.contract.draft import Draft
from eyas.engine.engine import Engine
from eyas.types import FinishReason, SamplingParams

CHAIN = SHAPES["chain"]


@pytest.fixture(scope="module")
def w() -> World:
    return world()


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one turn of a session gave: its prompt's length, hit and answer."""

    num_prompt: int
    answer: Answer


def sessions(engine: Engine, *, num_turns: int = 4) -> list[list[Turn]]:
    """Eight conversations side by side. Turns end by max_tokens, by a stop token, or by an abort
    after some tokens, which depends on their text alone."""
    texts = distinct_prompts([3, 8, 12, 15, 16, 17, 20, 29], seed=21)
    turns: list[list[Turn]] = [[] for _ in texts]
    for number in range(num_turns):
        params = [
            SamplingParams(
                temperature=(0.0, 1.0)[i % 2],
                seed=100 * number + i,
                max_tokens=18 + i,
                stop_token_ids=tuple(range(i, VOCAB, 16)) if (i + number) % 3 == 0 else (),
                frequency_penalty=0.5 if i in (1, 2) else 0.0,
            )
            for i in range(len(texts))
        ]
        aborts = {i for i in range(len(texts)) if (i + number) % 3 == 1}
        for index, answer in enumerate(one_turn(engine, texts, params, aborts)):
            turns[index].append(Turn(len(texts[index]), answer))
            user = [(7 * index + number + j * j) % VOCAB for j in range(5 + index)]
            texts[index] = texts[index] + answer.tokens + user
    assert_idle(engine)
    return turns


def one_turn(
    engine: Engine,
    texts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    aborts: set[int],
) -> list[Answer]:
    """Answers; those to abort are cut at 11 tokens, wherever in a round these end."""
    answers = [Answer() for _ in texts]
    for index, (text, one) in enumerate(zip(texts, params, strict=True)):
        engine.add(str(index), text, one)
    while engine.has_work:
        for output in engine.step():
            collect(answers[int(output.request_id)], output)
        for index in aborts:
            if len(answers[index].tokens) >= 11 and answers[index].finish is None:
                engine.abort(str(index))
                answers[index].finish = FinishReason.ABORT
                answers[index].tokens = answers[index].tokens[:11]
    return answers


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_eight_sessions_hit_as_much_with_speculation(w: World, page_size: int) -> None:
    """sglang#32459, vLLM PR#51769: reuse fell once EAGLE was on. Here not by one token: every turn
    finds all whole pages of what was committed before."""
    sizes = {"page_size": page_size, "num_pages": 2600 // page_size + 2}
    plain = sessions(make_engine(w.target, None, worker_shape(PLAIN, **sizes)))
    reasons = {turn.answer.finish for turns in plain for turn in turns}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    for turns in plain:
        committed = 0
        for turn in turns:
            assert turn.answer.num_cached == committed // page_size * page_size
            committed = turn.num_prompt + len(turn.answer.tokens) - 1
    for tree, run_ahead in ((CHAIN, 0), (TREE, 1), (SHAPES["deep"], 1)):
        engine = make_engine(w.target, w.draft, worker_shape(tree, **sizes), run_ahead=run_ahead)
        for turns, expected in zip(sessions(engine), plain, strict=True):
            aborted, committed = False, 0
            for turn, other in zip(turns, expected, strict=True):
                assert turn.answer.tokens == other.answer.tokens
                # Before an abort, a whole round may have committed the last token seen as well.
                assert turn.answer.num_cached in {
                    count // page_size * page_size for count in (committed, committed + aborted)
                }
                assert turn.answer.num_cached >= other.answer.num_cached
                aborted = turn.answer.finish is FinishReason.ABORT
                committed = turn.num_prompt + len(turn.answer.tokens) - 1


def finish_by(engine: Engine, how: str, prompt: list[int]) -> list[int]:
    """Run one request to an end of this kind; the tokens that it gave."""
    end = {"stop": tuple(range(0, VOCAB, 11))}.get(how, ())
    params = SamplingParams(
        temperature=1, seed=4, max_tokens=29, stop_token_ids=end, min_tokens=20 if end else 0
    )
    engine.add("first", prompt, params)
    answer = Answer()
    while engine.has_work:
        for output in engine.step():
            collect(answer, output)
        if how == "abort" and len(answer.tokens) > 23:
            engine.abort("first")
    assert answer.finish is {
        "stop": FinishReason.STOP,
        "max_tokens": FinishReason.LENGTH,
        "abort": None,
    }.get(how)
    assert len(answer.tokens) > 20
    return answer.tokens


@pytest.mark.parametrize(
    ("tree", "page_size"),
    [(PLAIN, 4), (CHAIN, 16), (TREE, 1), (TREE, 4), (TREE, 16)],
    ids=["plain, 4", "chain, 16", "tree, 1", "tree, 4", "tree, 16"],
)
@pytest.mark.parametrize("how", ["stop", "max_tokens", "abort"])
def test_a_hit_continues_the_draft_exactly(
    w: World, how: str, tree: TreeShape, page_size: int
) -> None:
    """After an answer of rounds of any shape, the next turn's caches equal one fresh prefill's: the
    linking entry and the last states of all pages too. Then its rounds equal the cold run's."""
    sizes = {"page_size": page_size, "num_pages": 400 // page_size + 2}
    engine = make_engine(w.target, w.draft, worker_shape(TREE, **sizes))
    engine.tree = tree  # rounds of the first turn
    prompt = distinct_prompts([21], seed=30)[0]
    text = prompt + finish_by(engine, how, prompt)
    engine.tree = TREE
    params = SamplingParams(temperature=1, seed=9, max_tokens=30)
    turn = [*text, *prompt[:7]]
    engine.add("second", turn, params)
    launch, engine._launch_round = engine._launch_round, lambda: None  # type: ignore[method-assign]
    hit = Answer()
    for output in engine.step():
        collect(hit, output)
    request = engine.requests["second"]
    assert request.num_cached_tokens == (len(text) - 1) // page_size * page_size > 0
    fresh = fresh_caches(w, turn, request.output_token_ids[0], page_size=page_size)
    caches(engine, "second").check(fresh)
    engine._launch_round = launch  # type: ignore[method-assign]
    while engine.has_work:
        for output in engine.step():
            collect(hit, output)
    cold_engine = make_engine(w.target, w.draft, worker_shape(TREE), prefix_caching=False)
    (cold,) = ask(cold_engine, [turn], [params])
    assert cold.num_cached == 0
    assert hit.tokens == cold.tokens and hit.rounds == cold.rounds
    assert max(cold.rounds) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_states_do_not_depend_on_chunks_or_preemption(w: World, temperature: float) -> None:
    """Caches, hidden state and first candidates after a prefill in chunks of any size, and after
    an answer was interrupted (sglang PR#26329, PR#26800, PR#28254)."""
    prompt = distinct_prompts([70], seed=31)[0]
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=30)
    whole = None
    for chunk_tokens in (1000, 7, 16, 17, 1):
        engine = make_engine(
            w.target, w.draft, worker_shape(TREE), chunk_tokens=chunk_tokens, prefix_caching=False
        )
        engine._launch_round = lambda: None  # type: ignore[method-assign]
        engine.add("a", prompt, params)
        while not engine.requests["a"].output_token_ids:
            engine.step()
        found = caches(engine, "a"), *states(engine, "a")
        whole = whole or found
        check_states(found, whole)
    engine = make_engine(w.target, w.draft, worker_shape(TREE))
    engine.add("a", prompt, params)
    for _ in range(6):
        engine.step()
    engine.scheduler.preempt()
    engine.worker.release(0)  # the only request is in the first slot
    engine._launch_round = lambda: None  # type: ignore[method-assign]
    engine.step()
    text = engine.requests["a"].token_ids  # the resumed prefill has chosen its last token
    caches(engine, "a").check(fresh_caches(w, text[:-1], text[-1], page_size=16))


def states(engine: Engine, request_id: str) -> tuple[torch.Tensor, ...]:
    """The draft's hidden state, first candidates and their scores."""
    slot, state = engine.requests[request_id].slot, engine.worker.state
    rows = (state.draft_hidden_SH, state.candidate_token_SK, state.candidate_score_SK)
    return tuple(row[slot].clone() for row in rows)


def check_states(found: tuple, want: tuple) -> None:
    found[0].check(want[0])
    assert torch.equal(found[2], want[2])
    for index in (1, 3):
        torch.testing.assert_close(found[index], want[index], atol=2e-4, rtol=1e-4)


def test_four_requests_share_600_tokens_of_a_poisoned_cache() -> None:
    """sglang#19796: the second request with a shared prefix read draft keys never written."""
    length = 700
    target = tiny_target(llama_config(max_position_embeddings=length))
    decoder = llama_config(
        num_layers=1, num_heads=3, num_kv_heads=1, head_dim=10, max_position_embeddings=length
    )
    draft = tiny_draft(target, draft_config(decoder))
    (prefix,) = distinct_prompts([600], seed=40)
    prompts = [[*prefix, *tail] for tail in distinct_prompts([1, 2, 17, 40], seed=41)]
    params = [SamplingParams(temperature=i % 2, seed=7 + i, max_tokens=20) for i in range(4)]
    sizes = {"max_model_len": length, "num_pages": 120}
    plain = ask(
        make_engine(target, None, worker_shape(PLAIN, **sizes), prefix_caching=False),
        prompts,
        params,
    )
    for prompt, one, answer in zip(prompts, params, plain, strict=True):
        assert top2_gap(target, prompt, answer.tokens, one)[0] > 1e-3
    engine = make_engine(target, draft, worker_shape(TREE, **sizes), chunk_tokens=256)
    first = ask(engine, prompts[:1], params[:1])
    answers = first + ask(engine, prompts[1:], params[1:])
    assert [a.tokens for a in answers] == [a.tokens for a in plain]
    assert [a.num_cached for a in answers] == [0, 592, 592, 592]
    cold = ask(
        make_engine(target, draft, worker_shape(TREE, **sizes), prefix_caching=False),
        prompts,
        params,
    )
    assert [a.rounds for a in answers] == [a.rounds for a in cold]


@pytest.mark.parametrize("name", ["fitted", "perfect"])
def test_eviction_under_pressure(w: World, name: str) -> None:
    """Prompts come again and again over a cache that holds only a few of them."""
    c, chooser = cases("mixed"), random.Random(3)
    drafts: dict[str, Draft] = {"fitted": w.draft, "perfect": scripted(c.texts)}
    engine = make_engine(
        w.target, drafts[name], worker_shape(TREE, num_slots=3, num_pages=19), run_ahead=1
    )
    chosen = [chooser.randrange(len(c.prompts)) for _ in range(24)]
    answers = ask(engine, [c.prompts[i] for i in chosen], [c.params[i] for i in chosen])
    dataclasses.replace(c, plain=[c.plain[i] for i in chosen]).check(answers)
    hits = [a.num_cached for a in answers]
    most = [(len(c.prompts[i]) - 1) // 16 * 16 for i in chosen]
    seen_before = [i in chosen[:n] for n, i in enumerate(chosen)]
    assert any(h == m > 0 for h, m in zip(hits, most, strict=True))
    assert any(h < m for h, m, s in zip(hits, most, seen_before, strict=True) if s)
    assert all(h <= m for h, m in zip(hits, most, strict=True))


def test_twins_in_one_batch(w: World) -> None:
    """Both compute their prompt, as neither is there yet; a third one then finds it."""
    c = cases("mixed")
    engine = make_engine(w.target, w.draft, worker_shape(TREE))
    answers = ask(engine, [c.prompts[10]] * 2, [c.params[10]] * 2)
    answers += ask(engine, [c.prompts[10]], [c.params[10]])
    assert [a.num_cached for a in answers] == [0, 0, 80]
    assert [a.tokens for a in answers] == [c.plain[10].tokens] * 3
    assert answers[0].rounds == answers[1].rounds == answers[2].rounds


def test_a_request_finds_the_pages_of_one_that_still_runs(w: World) -> None:
    """Prompt pages at once, answer pages as they fill up."""
    c = cases("sampled")
    engine = make_engine(w.target, w.draft, worker_shape(TREE, page_size=4, num_pages=400))
    engine.add("long", c.prompts[5], c.params[5])
    first = Answer()
    while len(first.tokens) < 20:
        for output in engine.step():
            collect(first, output)
    text = c.prompts[5] + first.tokens
    engine.add("short", [*text, 1, 2, 3], SamplingParams(temperature=0, max_tokens=3))
    second = Answer()
    while engine.has_work:
        for output in engine.step():
            collect(first if output.request_id == "long" else second, output)
    assert second.num_cached == (len(text) - 1) // 4 * 4
    assert first.tokens == c.plain[5].tokens
    (cold,) = ask(
        make_engine(w.target), [[*text, 1, 2, 3]], [SamplingParams(temperature=0, max_tokens=3)]
    )
    assert second.tokens == cold.tokens


def test_an_abort_between_two_chunks_leaves_whole_pages_only(w: World) -> None:
    """What was prefilled can be found; the rest of the prompt was never there."""
    (prompt,) = distinct_prompts([100], seed=50)
    params = SamplingParams(temperature=0, max_tokens=12)
    for num_steps in range(1, 5):
        engine = make_engine(w.target, w.draft, worker_shape(TREE), chunk_tokens=24)
        engine.add("gone", prompt, params)
        for _ in range(num_steps):
            engine.step()
        engine.abort("gone")
        (answer,) = ask(engine, [prompt], [params])
        assert answer.num_cached == 24 * num_steps // 16 * 16
        (cold,) = ask(make_engine(w.target, w.draft, worker_shape(TREE)), [prompt], [params])
        assert answer.tokens == cold.tokens and answer.rounds == cold.rounds


def test_without_a_cache_nothing_is_found(w: World) -> None:
    c = cases("greedy")
    engine = make_engine(w.target, w.draft, worker_shape(TREE), prefix_caching=False)
    for _ in range(2):
        (answer,) = ask(engine, c.prompts[10:11], c.params[10:11])
        assert answer.num_cached == 0 and answer.tokens == c.plain[10].tokens
