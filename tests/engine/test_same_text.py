"""Same seed, same text: no draft, tree, batch, chunk, page or preemption shows in the output (D9).

Three sets of twelve requests: greedy, seeded at temperature 1, and a mix with every processor
(top-k, top-p, min-p, penalties, logit bias, min_tokens, stop tokens). The yardstick is plain
decoding of each alone, checked against arithmetic in Python numbers.
"""

import dataclasses
import functools

import pytest
from fixtures.sampling_world import (
    NUM_NEW,
    SHAPES,
    STOPS,
    TREE,
    Answer,
    ask,
    cases,
    logits_by_step,
    same_answer,
)
from fixtures.slow_sampling import replay
from fixtures.tiny import count_preemptions, make_engine, scripted, tiny_draft, worker_shape
from fixtures.world import World, world

from eyas.config import PLAIN
from eyas.contract.draft import Draft
from eyas.types import FinishReason

KINDS = ("greedy", "sampled", "mixed")
KIND = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def w() -> World:
    return world()


@functools.cache
def usual(kind: str, shape: str) -> list[Answer]:
    """All requests of a kind together with the fitted draft."""
    w, c = world(), cases(kind)
    engine = make_engine(w.target, w.draft, worker_shape(SHAPES[shape]), run_ahead=1)
    return ask(engine, c.prompts, c.params)


def rounds(answers: list[Answer]) -> list[list[int]]:
    return [a.rounds for a in answers]


@KIND
def test_the_yardstick_is_what_the_options_say(w: World, kind: str) -> None:
    """Every choice, from one pass over the text; none is near a tie or a border of a truncation."""
    c = cases(kind)
    for prompt, params, plain in zip(c.prompts, c.params, c.plain, strict=True):
        logits = logits_by_step(w, prompt, plain.tokens)
        choices, lead = replay(
            logits, params, prompt=prompt, output=plain.tokens, stop_ids=params.stop_token_ids
        )
        assert choices == plain.tokens
        assert lead > 1e-4
        assert len(set(plain.tokens)) > 5
        assert plain.num_cached == 0 and plain.rounds == [1] * (len(plain.tokens) - 1)
    ends = [(p.min_tokens, len(a.tokens)) for p, a in zip(c.params, c.plain, strict=True)]
    if kind == "mixed":  # stops come as soon as they may, and later; others reach the limit
        stopped = [a.finish is FinishReason.STOP for a in c.plain]
        assert sum(stopped) == 3
        assert all(m < n for (m, n), stop in zip(ends, stopped, strict=True) if stop)
        assert all(a.tokens[-1] in STOPS for a, stop in zip(c.plain, stopped, strict=True) if stop)
    else:
        assert ends == [(0, NUM_NEW)] * len(ends)


@KIND
def test_plain_in_a_batch(w: World, kind: str) -> None:
    c = cases(kind)
    c.check(ask(make_engine(w.target, run_ahead=1), c.prompts, c.params))


@pytest.mark.parametrize("shape", list(SHAPES))
@KIND
def test_a_fitted_draft_in_a_batch(w: World, kind: str, shape: str) -> None:
    answers = usual(kind, shape)
    cases(kind).check(answers)
    assert {n for a in answers for n in a.rounds} >= {1, 2}  # acceptances and rejections


@KIND
def test_a_random_draft(w: World, kind: str) -> None:
    c = cases(kind)
    engine = make_engine(w.target, tiny_draft(w.target, seed=2), worker_shape(TREE))
    c.check(ask(engine, c.prompts, c.params))


@pytest.mark.parametrize("shape", ["chain", "pruned tree", "deep"])
@KIND
def test_a_perfect_draft(w: World, kind: str, shape: str) -> None:
    """Whole blocks: every option must hold on the last row as on the first."""
    c, block = cases(kind), SHAPES[shape].depth + 1
    engine = make_engine(w.target, scripted(c.texts), worker_shape(SHAPES[shape]), run_ahead=1)
    answers = ask(engine, c.prompts, c.params)
    c.check(answers)
    for answer in answers:
        whole, rest = divmod(len(answer.tokens) - 1, block)
        assert answer.rounds == [block] * whole + [rest] * (rest > 0)


@pytest.mark.parametrize("shape", ["chain", "pruned tree"])
@KIND
def test_alone_with_a_draft(w: World, kind: str, shape: str) -> None:
    """What others in the batch ask for shows neither in the text nor in the acceptance."""
    c = cases(kind)
    engine = make_engine(w.target, w.draft, worker_shape(SHAPES[shape]), prefix_caching=False)
    pairs = zip(c.prompts[::3], c.params[::3], strict=True)
    answers = [ask(engine, [prompt], [params])[0] for prompt, params in pairs]
    assert [a.tokens for a in answers] == [a.tokens for a in c.plain[::3]]
    assert rounds(answers) == rounds(usual(kind, shape)[::3])


@pytest.mark.parametrize("chunk_tokens", [1, 7, 10_000])  # and 64 in all other tests
@KIND
def test_prefill_chunks(w: World, kind: str, chunk_tokens: int) -> None:
    """Nor do the draft's states differ: the rounds are the same (trap 13)."""
    c = cases(kind)
    chosen = range(1, 9) if chunk_tokens == 1 else range(12)
    engine = make_engine(
        w.target, w.draft, worker_shape(TREE), chunk_tokens=chunk_tokens, run_ahead=1
    )
    answers = ask(engine, [c.prompts[i] for i in chosen], [c.params[i] for i in chosen])
    dataclasses.replace(c, plain=[c.plain[i] for i in chosen]).check(answers)
    assert rounds(answers) == [usual(kind, "pruned tree")[i].rounds for i in chosen]


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("name", ["plain", "tree", "perfect"])
@KIND
def test_preemption(w: World, kind: str, name: str, prefix_caching: bool) -> None:
    """Counts, seeds, min_tokens and log-probabilities go on where they were."""
    c = cases(kind)
    drafts: dict[str, Draft | None] = {"plain": None, "tree": w.draft, "perfect": scripted(c.texts)}
    tree = PLAIN if name == "plain" else TREE
    engine = make_engine(
        w.target,
        drafts[name],
        worker_shape(tree, num_pages=15),
        run_ahead=1,
        prefix_caching=prefix_caching,
    )
    victims = count_preemptions(engine)
    c.check(ask(engine, c.prompts, c.params))
    assert len(victims) > 5


@pytest.mark.parametrize("num_pages_hit", range(6))
def test_prefix_hits_at_every_page_border(w: World, num_pages_hit: int) -> None:
    """The same text, log-probabilities and acceptance as without a hit, for all three sets."""
    size = 8
    engine = make_engine(w.target, w.draft, worker_shape(TREE, page_size=size, num_pages=900))
    for kind in KINDS:
        c = cases(kind)
        chosen = [i for i, p in enumerate(c.prompts) if len(p) > num_pages_hit * size][-5:]
        prompts, params = [c.prompts[i] for i in chosen], [c.params[i] for i in chosen]
        # Other requests share the first pages and go on otherwise.
        heads = [[*p[: num_pages_hit * size], 63 - p[num_pages_hit * size]] for p in prompts]
        short = dataclasses.replace(params[0], max_tokens=1, min_tokens=0)
        ask(engine, [h + [1] * size for h in heads], [short] * len(heads))
        answers = ask(engine, prompts, params)
        assert {a.num_cached for a in answers} == {num_pages_hit * size}
        for index, answer in zip(chosen, answers, strict=True):
            same_answer(answer, c.plain[index])
            assert answer.rounds == usual(kind, "pruned tree")[index].rounds


@KIND
def test_small_pages(w: World, kind: str) -> None:
    c = cases(kind)
    shape = worker_shape(TREE, page_size=1, num_pages=1300)
    answers = ask(make_engine(w.target, w.draft, shape, run_ahead=1), c.prompts, c.params)
    c.check(answers)
    assert rounds(answers) == rounds(usual(kind, "pruned tree"))
