"""Sampling options one by one: in blocks, in batches, and beside requests that want others."""

import dataclasses
import itertools
import math
import random

import pytest
from fixtures.sampling_world import (
    MIXED,
    SHAPES,
    TREE,
    Answer,
    ask,
    caches,
    cases,
    collect,
    fresh_caches,
    logits_by_step,
    same_answer,
)
from fixtures.slow_sampling import replay
from fixtures.tiny import VOCAB, make_engine, scripted, worker_shape
from fixtures.tiny_pair import write_pair
from fixtures.world import World, world

from eyas import LLM
from eyas.config import PLAIN, TreeShape
from eyas.scheduler.scheduler import Phase
from eyas.types import EyasError, FinishReason, SamplingParams

CHAIN = SHAPES["chain"]
K = 5
BLOCKS = {"chain": TreeShape(K, 1, K + 1), "tree": TreeShape(K, 2, 12)}
SHAPE = pytest.mark.parametrize("shape", list(BLOCKS))


@pytest.fixture(scope="module")
def w() -> World:
    return world()


def plainly(w: World, prompt: list[int], params: SamplingParams) -> Answer:
    """Without a draft, alone."""
    (answer,) = ask(make_engine(w.target), [prompt], [params])
    return answer


def perfectly(w: World, prompt: list[int], params: SamplingParams, shape: str) -> Answer:
    """With a draft that knows the plain answer."""
    text = prompt + plainly(w, prompt, params).tokens
    engine = make_engine(w.target, scripted([text]), worker_shape(BLOCKS[shape]), run_ahead=1)
    (answer,) = ask(engine, [prompt], [params])
    assert set(answer.rounds[:-1]) <= {K + 1}
    return answer


@pytest.mark.parametrize("tree", [PLAIN, TREE], ids=["plain", "tree"])
def test_logprobs_against_one_pass_over_the_text(w: World, tree: TreeShape) -> None:
    """Of the model's own distribution, before any option; one a token, from the row that chose it,
    for drafted rows too (llama.cpp#27972)."""
    c = cases("mixed")
    engine = make_engine(w.target, w.draft if tree.depth else None, worker_shape(tree))
    for prompt, params, answer in zip(
        c.prompts, c.params, ask(engine, c.prompts, c.params), strict=True
    ):
        if params.logprobs is None:
            assert answer.logprobs == []
            continue
        assert [t.token_id for t in answer.logprobs] == answer.tokens
        for step, one in enumerate(logits_by_step(w, prompt, answer.tokens)):
            entry = answer.logprobs[step]
            log_sum = math.log(math.fsum(math.exp(x) for x in one))
            assert entry.logprob == pytest.approx(one[entry.token_id] - log_sum, abs=1e-4)
            best = sorted((x - log_sum for x in one), reverse=True)[: params.logprobs]
            assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-4)
            for token, value in entry.top:
                assert value == pytest.approx(one[token] - log_sum, abs=1e-4)


def test_neighbours_do_not_change_the_logprobs_reported(w: World) -> None:
    """One asks for 20, one for none, one for its own alone, in one batch."""
    c = cases("sampled")
    counts = (20, None, 0)
    params = [dataclasses.replace(p, logprobs=n) for p, n in zip(c.params[:3], counts, strict=True)]
    answers = ask(make_engine(w.target, w.draft, worker_shape(CHAIN)), c.prompts[:3], params)
    for answer, plain, count in zip(answers, c.plain, counts, strict=False):
        assert answer.tokens == plain.tokens
        assert len(answer.logprobs) == (0 if count is None else len(answer.tokens))
        assert all(len(t.top) == count for t in answer.logprobs)


@SHAPE
@pytest.mark.parametrize("kind", ["stop token", "end token"])
def test_min_tokens_over_two_blocks(w: World, kind: str, shape: str) -> None:
    """The end token is the best one everywhere: exactly min_tokens others come before it.

    vLLM PR#41768 masked one row too many, PR#32642 none.
    """
    prompt, end = cases("greedy").prompts[3], 17
    free = SamplingParams(temperature=0, max_tokens=40, logit_bias={end: -100})
    others = plainly(w, prompt, free).tokens
    for min_tokens in range(2 * (K + 1) + 2):
        params = SamplingParams(
            temperature=0,
            max_tokens=40,
            min_tokens=min_tokens,
            logit_bias={end: 90},
            stop_token_ids=(end,) if kind == "stop token" else (),
        )
        expected = [*others[:min_tokens], end]
        eos = [end] if kind == "end token" else []
        engine = make_engine(
            w.target, scripted([prompt + expected]), worker_shape(BLOCKS[shape]), eos=eos
        )
        (answer,) = ask(engine, [prompt], [params])
        assert answer.tokens == expected
        assert answer.finish is FinishReason.STOP
        assert sum(answer.rounds) == min_tokens
        assert len(answer.rounds) == math.ceil(min_tokens / (K + 1))


def test_min_tokens_up_to_max_tokens(w: World) -> None:
    """The border of both: the last token may not be the end token either."""
    prompt = cases("greedy").prompts[3]
    for limit in (1, 6, 7, 8):
        params = SamplingParams(
            temperature=0,
            max_tokens=limit,
            min_tokens=limit,
            logit_bias={17: 90},
            stop_token_ids=(17,),
        )
        answer = perfectly(w, prompt, params, "chain")
        assert len(answer.tokens) == limit and 17 not in answer.tokens
        assert answer.finish is FinishReason.LENGTH


@SHAPE
@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [-2.0, 2.0])
def test_penalties_count_within_a_block(w: World, penalty: str, value: float, shape: str) -> None:
    """vllm#18902: ignored on drafted rows. One repeated word as the prompt."""
    params = SamplingParams(temperature=0, max_tokens=36, **{penalty: value})
    prompt = [5] * 20
    plain = plainly(w, prompt, params)
    same_answer(perfectly(w, prompt, params, shape), plain)
    engine = make_engine(w.target, w.draft, worker_shape(BLOCKS[shape]))
    same_answer(ask(engine, [prompt], [params])[0], plain)
    logits = logits_by_step(w, prompt, plain.tokens)
    choices, lead = replay(logits, params, prompt=prompt, output=plain.tokens)
    assert choices == plain.tokens and lead > 1e-4
    most = max(plain.tokens.count(token) for token in plain.tokens)
    repeats = sum(a == b for a, b in itertools.pairwise(plain.tokens))
    if value < 0 and penalty == "frequency_penalty":
        assert most > 20 and repeats > 15  # the more often it came the likelier it is
    if value > 0 and penalty == "frequency_penalty":
        assert most <= 5


@SHAPE
def test_a_bias_holds_on_every_row(w: World, shape: str) -> None:
    """The most that it can do: one token alone, and all the likely ones never."""
    prompt = cases("sampled").prompts[4]
    forced = SamplingParams(temperature=1, seed=1, max_tokens=25, logit_bias={11: 100})
    assert perfectly(w, prompt, forced, shape).tokens == [11] * 25
    banned = dict.fromkeys(range(32), -100.0)
    params = SamplingParams(temperature=1, seed=1, max_tokens=25, logit_bias=banned)
    answer = perfectly(w, prompt, params, shape)
    assert min(answer.tokens) >= 32
    same_answer(answer, plainly(w, prompt, params))


@pytest.mark.parametrize("tree", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_seeded_unseeded_greedy_and_cold_in_one_batch(w: World, tree: TreeShape) -> None:
    """vllm#6038, #9441, #13196: seeds got lost, or T = 0 changed with its neighbours."""
    prompts = cases("sampled").prompts[:8]
    params = [
        SamplingParams(
            max_tokens=25,
            temperature=(0.0, 0.1, 1.0, 1.0)[i % 4],
            seed=None if i % 4 == 3 else 70 + i,
        )
        for i in range(8)
    ]
    engine = make_engine(w.target, w.draft if tree.depth else None, worker_shape(tree))
    answers = ask(engine, prompts, params)
    for prompt, one, answer in zip(prompts, params, answers, strict=True):
        again = plainly(w, prompt, one)
        assert (answer.tokens == again.tokens) == (one.seed is not None)
        assert len(answer.tokens) == 25 and len(set(answer.tokens)) > 5


@pytest.mark.parametrize("shape", ["chain", "pruned tree"])
@pytest.mark.parametrize("kind", ["sampled", "mixed"])
def test_requests_without_speculation_beside_others(w: World, kind: str, shape: str) -> None:
    """Their acceptance is exactly 1.0; the others' is what it was; the output is unchanged."""
    c, tree = cases(kind), SHAPES[shape]
    alike = ask(make_engine(w.target, w.draft, worker_shape(tree)), c.prompts, c.params)
    params = [dataclasses.replace(p, speculation=bool(i % 3)) for i, p in enumerate(c.params)]
    engine = make_engine(w.target, w.draft, worker_shape(tree), run_ahead=1)
    answers = ask(engine, c.prompts, params)
    c.check(answers)
    for one, answer, usual in zip(params, answers, alike, strict=True):
        if one.speculation:
            assert answer.rounds == usual.rounds
        else:
            assert answer.rounds == [1] * (len(answer.tokens) - 1)


def test_nobody_wants_speculation(w: World) -> None:
    """Then no tree is drafted at all, and a later request speculates as ever."""
    c = cases("sampled")
    engine = make_engine(w.target, w.draft, worker_shape(TREE))
    shapes = []
    launch = engine.worker.round
    engine.worker.round = lambda *args, **settings: (  # type: ignore[method-assign]
        shapes.append(settings["tree"]),
        launch(*args, **settings),
    )[1]
    engine.add("a", c.prompts[0], dataclasses.replace(c.params[0], speculation=False))
    a, b = Answer(), Answer()
    while engine.has_work:
        if len(a.tokens) == 12:
            engine.add("b", c.prompts[8], c.params[8])
        for output in engine.step():
            collect(a if output.request_id == "a" else b, output)
    assert set(shapes[:10]) == {PLAIN} and TREE in shapes and shapes[-1] == PLAIN
    same_answer(a, c.plain[0])
    same_answer(b, c.plain[8])
    assert a.rounds == [1] * (len(a.tokens) - 1) and max(b.rounds) > 1


@pytest.mark.parametrize("seed", [0, 1])
def test_the_tree_may_change_between_rounds(w: World, seed: int) -> None:
    """Every few steps another shape, plain among them: the same text, and caches without holes."""
    c, chooser = cases("mixed"), random.Random(seed)
    shapes = [PLAIN, CHAIN, TREE, SHAPES["whole tree"], TreeShape(1, 1, 2), TreeShape(4, 2, 9)]
    engine = make_engine(w.target, w.draft, worker_shape(TreeShape(4, 3, 25), page_size=8))
    answers = {str(i): Answer() for i in range(len(c.prompts))}
    for request_id, prompt, params in zip(answers, c.prompts, c.params, strict=True):
        engine.add(request_id, prompt, params)
    used, num_checked = set(), 0
    while engine.has_work:
        engine.tree = chooser.choice(shapes)
        used.add(engine.tree)
        for output in engine.step():
            collect(answers[output.request_id], output)
        running = [r for r in engine.requests.values() if r.phase is Phase.RUNNING]
        for request in running if chooser.random() < 0.1 else []:
            text = request.token_ids
            fresh = fresh_caches(w, text[:-1], text[-1], page_size=8)
            caches(engine, request.request_id).check(fresh)
            num_checked += 1
    assert len(used) == len(shapes) and num_checked > 5
    c.check(list(answers.values()))


def test_an_option_of_one_request_is_no_other_requests(w: World) -> None:
    """Each slot is used for a request with a bias, then for ones without and with all options."""
    c, greedy = cases("mixed"), cases("greedy")
    forced = SamplingParams(temperature=0, max_tokens=2, logit_bias={9: 100}, min_tokens=2)
    engine = make_engine(w.target, w.draft, worker_shape(TREE, num_slots=2))
    pairs = [(kind, i) for i in (7, 8, 10, 4) for kind in (c, greedy)]
    prompts = [[1], [2], *(k.prompts[i] for k, i in pairs)]
    answers = ask(engine, prompts, [forced, forced, *(k.params[i] for k, i in pairs)])
    assert [a.tokens for a in answers[:2]] == [[9, 9]] * 2
    for answer, (kind, i) in zip(answers[2:], pairs, strict=True):
        same_answer(answer, kind.plain[i])


def test_what_cannot_run_is_refused_and_the_others_go_on(w: World) -> None:
    """Ids from -1 to one past the end, in the prompt, as a bias, as a stop (vllm#24211)."""
    c = cases("mixed")
    engine = make_engine(w.target, w.draft, worker_shape(TREE), run_ahead=1)
    answers = {str(i): Answer() for i in range(3)}
    for request_id, prompt, params in zip(answers, c.prompts, c.params, strict=False):
        engine.add(request_id, prompt, params)
    wrong = [
        ([1, -1], SamplingParams()),
        ([VOCAB], SamplingParams()),
        ([2**40], SamplingParams()),
        ([1], SamplingParams(logit_bias={VOCAB: 1.0})),
        ([1], SamplingParams(logit_bias={-1: 1.0})),
        ([1], SamplingParams(stop_token_ids=(VOCAB,), min_tokens=2)),
    ]
    while engine.has_work:
        for prompt, params in wrong:
            with pytest.raises(EyasError, match="outside"):
                engine.add("wrong", prompt, params)
        for output in engine.step():
            collect(answers[output.request_id], output)
    for answer, plain in zip(answers.values(), c.plain, strict=False):
        same_answer(answer, plain)


def test_end_tokens_past_the_vocabulary_do_no_harm(w: World) -> None:
    """A config that names them stops nothing, and min_tokens masks nothing."""
    c = cases("mixed")
    engine = make_engine(w.target, w.draft, worker_shape(TREE), eos=[VOCAB, VOCAB + 1000])
    c.check(ask(engine, c.prompts, c.params))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    return LLM(str(target), draft=str(draft), max_model_len=128, page_size=4)


def test_each_of_n_answers_can_be_had_again_alone(llm: LLM) -> None:
    """Answer i is that of seed + i."""
    params = SamplingParams(temperature=1, seed=2**64 - 2, max_tokens=12, n=4, logprobs=1)
    other = SamplingParams(temperature=0, max_tokens=5, n=2)
    outputs = llm.generate(["the cat", "a dog"], [params, other])
    assert [o.index for o in outputs] == [0, 1, 2, 3, 0, 1]
    assert len({tuple(o.token_ids) for o in outputs[:4]}) == 4
    for index, output in enumerate(outputs[:4]):
        alone = dataclasses.replace(params, n=1, seed=2**64 - 2 + index)
        (again,) = llm.generate("the cat", alone)
        assert (again.token_ids, again.text) == (output.token_ids, output.text)
        assert len(output.logprobs) == 12 and output.index == index
    assert outputs[4].token_ids == outputs[5].token_ids


def test_unseeded_answers_differ(llm: LLM) -> None:
    outputs = llm.generate("the cat", SamplingParams(temperature=1, max_tokens=12, n=5))
    assert len({tuple(o.token_ids) for o in outputs}) == 5


def test_a_stream_gives_one_answer(llm: LLM) -> None:
    with pytest.raises(EyasError, match="use generate for n > 1"):
        next(llm.stream("the cat", SamplingParams(n=2)))


def test_the_second_prompt_of_a_conversation_finds_the_first(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=10)
    (first,) = llm.generate([1] * 22, params)
    (second,) = llm.generate([*first.prompt_token_ids, *first.token_ids, 3, 4], params)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 28)


def test_all_mixed_parameters_differ_from_plain_greedy_ones() -> None:
    """The mix is one of processors: each is used by at least two of the twelve."""
    off = SamplingParams()
    names = ("top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    names += ("repetition_penalty", "logit_bias", "min_tokens", "stop_token_ids", "logprobs")
    for name in names:
        assert sum(getattr(p, name) != getattr(off, name) for p in MIXED) >= 2, name
