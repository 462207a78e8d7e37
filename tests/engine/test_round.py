"""Speculation is invisible in the output: every draft, tree, batch and setting says the same (D9).

Twenty fixed prompts, half greedy and half seeded; the yardstick is plain decoding of each alone.
"""

import functools
import itertools

import pytest
from fixtures.tiny import (
    VOCAB,
    Generated,
    assert_idle,
    count_preemptions,
    make_engine,
    run,
    scripted,
    tiny_draft,
    worker_shape,
    wrong_sequence,
)
from fixtures.world import NUM_NEW, World, top2_gap, world

from eyas.config import PLAIN, TreeShape
from eyas.contract.draft import Draft
from eyas.types import FinishReason, SamplingParams

CHAIN, TREE = TreeShape(3, 1, 4), TreeShape(4, 3, 12)
SHAPES = {"chain": CHAIN, "tree": TREE}
MORE_SHAPES = {
    "chain of 1": TreeShape(1, 1, 2),
    "whole tree": TreeShape(2, 3, 13),
    "tree as small as a chain": TreeShape(4, 3, 5),
    "64 nodes": TreeShape(3, 7, 64),
}
ALL_SHAPES = pytest.mark.parametrize(
    ("shape", "run_ahead"),
    [*itertools.product(SHAPES, (0, 1)), *itertools.product(MORE_SHAPES, (1,))],
)
SHORT = 40  # new tokens where the full 200 would say no more


@pytest.fixture(scope="module")
def w() -> World:
    return world()


@functools.cache
def usual(tree: TreeShape, run_ahead: int = 0) -> list[Generated]:
    """All prompts together, with the fitted draft."""
    w = world()
    engine = make_engine(w.target, w.draft, worker_shape(tree), run_ahead=run_ahead)
    return run(engine, w.prompts, w.params)


def usual_rounds(tree: TreeShape, num_new: int) -> list[list[int]]:
    """The rounds of `usual`, cut where max_tokens would have cut them."""
    cut = []
    for result in usual(tree):
        ends = list(itertools.accumulate(result.rounds, initial=1))
        starts = itertools.takewhile(lambda pair: pair[0] < num_new, itertools.pairwise(ends))
        cut.append([min(end, num_new) - start for start, end in starts])
    return cut


def outputs(results: list[Generated]) -> list[list[int]]:
    return [r.tokens for r in results]


def test_the_yardstick_is_not_near_a_tie(w: World) -> None:
    """And it is what one pass over the whole text would choose at every position."""
    for prompt, answer, params in zip(w.prompts, w.plain, w.params, strict=True):
        assert len(answer) == NUM_NEW
        gap, choices = top2_gap(w.target, prompt, answer, params)
        assert gap > 2e-4
        assert choices == answer
        assert len(set(answer)) > 10


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_plain_in_a_batch_is_plain_alone(w: World, run_ahead: int) -> None:
    results = run(make_engine(w.target, run_ahead=run_ahead), w.prompts, w.params)
    assert outputs(results) == w.plain
    assert all(r.rounds == [1] * (NUM_NEW - 1) and r.first == 1 for r in results)
    assert all(r.finish is FinishReason.LENGTH for r in results)


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_fitted_draft_changes_nothing(w: World, shape: str, run_ahead: int) -> None:
    tree = SHAPES[shape]
    results = usual(tree, run_ahead)
    assert outputs(results) == w.plain
    assert [r.rounds for r in results] == [r.rounds for r in usual(tree)]
    # Not in vain either: rejections, acceptances and whole blocks all occur.
    rounds = [n for r in results for n in r.rounds]
    assert set(rounds) == set(range(1, tree.depth + 2))


@pytest.mark.parametrize("shape", list(MORE_SHAPES))
def test_a_fitted_draft_changes_nothing_in_any_shape(w: World, shape: str) -> None:
    engine = make_engine(w.target, w.draft, worker_shape(MORE_SHAPES[shape]), run_ahead=1)
    results = run(engine, w.prompts, w.limited(SHORT))
    assert outputs(results) == [answer[:SHORT] for answer in w.plain]
    assert {1, 2} <= {n for r in results for n in r.rounds}


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("index", [0, 5, 16])
def test_alone_with_a_draft(w: World, index: int, tree: TreeShape) -> None:
    """Acceptance, too, depends on nothing else in the batch."""
    engine = make_engine(w.target, w.draft, worker_shape(tree), run_ahead=1)
    (alone,) = run(engine, w.prompts[index : index + 1], w.params[index : index + 1])
    assert alone.tokens == w.plain[index]
    assert alone.rounds == usual(tree)[index].rounds


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_batches_without_the_other_kind(w: World, kind: str, tree: TreeShape) -> None:
    """All greedy (no noise is made at all), and all sampled; acceptance as in the mixed batch."""
    chosen = [i for i, p in enumerate(w.params) if (p.temperature == 0) == (kind == "greedy")]
    assert len(chosen) == 10
    engine = make_engine(w.target, w.draft, worker_shape(tree))
    params = w.limited(SHORT)
    results = run(engine, [w.prompts[i] for i in chosen], [params[i] for i in chosen])
    assert outputs(results) == [w.plain[i][:SHORT] for i in chosen]
    rounds = usual_rounds(tree, SHORT)
    assert [r.rounds for r in results] == [rounds[i] for i in chosen]


def test_a_random_draft_changes_nothing(w: World) -> None:
    engine = make_engine(w.target, tiny_draft(w.target, seed=2), worker_shape(TREE))
    results = run(engine, w.prompts, w.limited(SHORT))
    assert outputs(results) == [answer[:SHORT] for answer in w.plain]


@ALL_SHAPES
def test_a_perfect_draft_gives_every_round_in_full(w: World, shape: str, run_ahead: int) -> None:
    tree = (SHAPES | MORE_SHAPES)[shape]
    block = tree.depth + 1
    num_rounds = (NUM_NEW - 1) // block
    num_new = 1 + num_rounds * block
    engine = make_engine(w.target, scripted(w.texts), worker_shape(tree), run_ahead=run_ahead)
    results = run(engine, w.prompts, w.limited(num_new))
    assert outputs(results) == [answer[:num_new] for answer in w.plain]
    assert all(r.rounds == [block] * num_rounds and r.first == 1 for r in results)


@ALL_SHAPES
def test_a_null_draft_gives_one_token_a_round(w: World, shape: str, run_ahead: int) -> None:
    tree = (SHAPES | MORE_SHAPES)[shape]
    assert tree.topk < VOCAB // 2  # so that no runner-up of a wrong proposal is right
    wrong = [wrong_sequence(p, a) for p, a in zip(w.prompts, w.plain, strict=True)]
    engine = make_engine(w.target, scripted(wrong), worker_shape(tree), run_ahead=run_ahead)
    results = run(engine, w.prompts, w.limited(SHORT))
    assert outputs(results) == [answer[:SHORT] for answer in w.plain]
    assert all(r.rounds == [1] * (SHORT - 1) for r in results)


def test_a_draft_without_a_speculative_shape_is_plain(w: World) -> None:
    results = run(make_engine(w.target, w.draft, worker_shape(PLAIN)), w.prompts, w.limited(20))
    assert outputs(results) == [answer[:20] for answer in w.plain]
    assert all(r.rounds == [1] * 19 for r in results)


SETTINGS = {
    "pages of 1": {"page_size": 1, "num_pages": 2600},
    "pages of 2": {"page_size": 2, "num_pages": 1300},
    "pages of 7": {"page_size": 7, "num_pages": 400},
    "one page each": {"page_size": 320, "num_pages": 10},
    "two slots": {"num_slots": 2},
}


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_pages_and_slots_change_nothing(w: World, name: str, tree: TreeShape) -> None:
    engine = make_engine(w.target, w.draft, worker_shape(tree, **SETTINGS[name]), run_ahead=1)
    results = run(engine, w.prompts, w.limited(SHORT))
    assert outputs(results) == [answer[:SHORT] for answer in w.plain]
    assert [r.rounds for r in results] == usual_rounds(tree, SHORT)


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 17, 10_000])
def test_prefill_chunks_change_nothing(w: World, chunk_tokens: int, tree: TreeShape) -> None:
    """Nor the draft's first candidates: the rounds are the same (trap 13)."""
    num_new, chosen = 12, [i for i, p in enumerate(w.prompts) if len(p) < 40 * chunk_tokens]
    engine = make_engine(
        w.target, w.draft, worker_shape(tree), chunk_tokens=chunk_tokens, run_ahead=1
    )
    params = w.limited(num_new)
    results = run(engine, [w.prompts[i] for i in chosen], [params[i] for i in chosen])
    assert outputs(results) == [w.plain[i][:num_new] for i in chosen]
    rounds = usual_rounds(tree, num_new)
    assert [r.rounds for r in results] == [rounds[i] for i in chosen]


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "chain", "tree", "perfect"])
def test_preemption_changes_nothing(w: World, kind: str, run_ahead: int) -> None:
    drafts: dict[str, tuple[Draft | None, TreeShape]] = {
        "plain": (None, PLAIN),
        "chain": (w.draft, CHAIN),
        "tree": (w.draft, TREE),
        "perfect": (scripted(w.texts), TREE),
    }
    draft, tree = drafts[kind]
    # 17 pages of 16 for up to eight requests of up to 11 pages each.
    shape = worker_shape(tree, num_pages=19)
    engine = make_engine(w.target, draft, shape, run_ahead=run_ahead)
    victims = count_preemptions(engine)
    num_new = 60
    results = run(engine, w.prompts, w.limited(num_new))
    assert outputs(results) == [answer[:num_new] for answer in w.plain]
    assert len(victims) > 10 and max(map(victims.count, victims)) > 1
    for index, result in enumerate(results):  # a victim may not have come to its prefill
        assert 1 <= result.first <= 1 + victims.count(str(index))
    assert sum(r.first for r in results) > len(results)
    if kind == "perfect":  # the resumed request's script goes on where it was
        assert all(n == 5 for r in results for n in r.rounds[:-1])


def test_the_same_request_twice_and_a_request_for_itself(w: World) -> None:
    """Equal prompts and seeds in one batch say the same; another seed says something else."""
    index = 1
    prompt, params = w.prompts[index], w.params[index]
    assert params.temperature == 1.0
    other = w.params[5]
    engine = make_engine(w.target, w.draft, worker_shape(TREE))
    results = run(engine, [prompt] * 3, [params, params, other])
    assert results[0].tokens == results[1].tokens == w.plain[index]
    assert results[2].tokens != w.plain[index]


def test_seeds_wrap_at_64_bits(w: World) -> None:
    seed = w.params[13].seed
    assert seed is not None and seed > 2**64
    seeds = (seed, seed % 2**64, seed - 3 * 2**64)
    params = [SamplingParams(max_tokens=30, temperature=1.0, seed=s) for s in seeds]
    results = run(make_engine(w.target), [w.prompts[13]] * 3, params)
    assert outputs(results) == [w.plain[13][:30]] * 3


def test_unseeded_requests_differ(w: World) -> None:
    params = [SamplingParams(max_tokens=30, temperature=1.0)] * 2
    results = run(make_engine(w.target), [w.prompts[0]] * 2, params)
    assert results[0].tokens != results[1].tokens


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("num_steps", range(1, 6))
def test_an_abort_changes_nothing_for_others(w: World, num_steps: int, run_ahead: int) -> None:
    """In mid-prefill (the 110 tokens take two steps) and in mid-answer; what the aborted one held
    is taken by a newcomer while its last round may be unread."""
    shape = worker_shape(TREE, num_slots=3, num_pages=2 + 3 * 10)
    engine = make_engine(w.target, w.draft, shape, run_ahead=run_ahead)
    chosen, params = (3, 19, 5, 9), w.limited(30)
    for index in chosen:
        engine.add(str(index), w.prompts[index], params[index])
    got: dict[str, list[int]] = {str(index): [] for index in chosen}
    for turn in range(200):
        if turn == num_steps:
            engine.abort("19")
        for output in engine.step():
            assert turn < num_steps or output.request_id != "19"
            got[output.request_id] += output.new_token_ids
    assert_idle(engine)
    for index in chosen:
        answer = w.plain[index][:30]
        assert got[str(index)] == (answer[: len(got["19"])] if index == 19 else answer)
    assert len(got["19"]) < 30
