"""How much a round accepts: an independent replay, and every place where a block can be cut."""

import dataclasses

import pytest
from fixtures.replay import Replay
from fixtures.slow_draft import SlowDraft
from fixtures.tiny import (
    VOCAB,
    Generated,
    full_forward,
    make_engine,
    run,
    scripted,
    tiny_draft_and_weights,
    worker_shape,
    wrong_sequence,
)
from fixtures.world import World, world

from eyas.config import PLAIN, TreeShape
from eyas.models.eagle3 import Eagle3Draft
from eyas.types import FinishReason, SamplingParams

K = 5
EDGE = 18  # a greedy prompt whose answer starts with nine different tokens
CHAIN, TREE = TreeShape(K, 1, K + 1), TreeShape(K, 2, 12)
BOTH = pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])


@pytest.fixture(scope="module")
def w() -> World:
    return world()


REPLAYED = {
    "chain of 1": TreeShape(1, 1, 2),
    "chain": TreeShape(4, 1, 5),
    "whole tree": TreeShape(2, 3, 13),
    "pruned tree": TreeShape(4, 3, 9),
    "deep tree": TreeShape(5, 2, 8),
}


def check_replay(w: World, draft: Eagle3Draft, slow: SlowDraft, tree: TreeShape) -> list[int]:
    """Rounds of five prompts (greedy and two temperatures) equal the replay's; returns them all."""
    num_new, chosen = 60, (0, 1, 3, 10, 11)
    prompts = [w.prompts[i] for i in chosen]
    params = [w.limited(num_new)[i] for i in chosen]
    assert {p.temperature for p in params} == {0.0, 0.6, 1.0}
    results = run(make_engine(w.target, draft, worker_shape(tree)), prompts, params)
    for prompt, one, result in zip(prompts, params, results, strict=True):
        text = prompt + result.tokens
        output, _ = full_forward(w.target, text, draft.boundaries)
        assert output.features_TF is not None and one.seed is not None
        replay = Replay(slow, text, output.features_TF, seed=one.seed, temperature=one.temperature)
        assert result.rounds == replay.rounds(len(prompt), tree)
    return [n for r in results for n in r.rounds]


@pytest.mark.parametrize("shape", list(REPLAYED))
def test_acceptance_equals_a_slow_replay(w: World, shape: str) -> None:
    tree = REPLAYED[shape]
    rounds = check_replay(w, w.draft, w.slow_draft, tree)
    assert len(set(rounds)) >= min(3, tree.depth + 1)


@pytest.mark.parametrize("shape", ["chain", "pruned tree"])
def test_acceptance_of_a_modern_draft_equals_the_replay(w: World, shape: str) -> None:
    """With fc_norm and norm_output (EAGLE-3.1), norm_before_residual, and random weights."""
    config = dataclasses.replace(
        w.draft.config, fc_norm=True, norm_output=True, norm_before_residual=True
    )
    draft, weights = tiny_draft_and_weights(w.target, config, seed=9)
    rounds = check_replay(w, draft, SlowDraft(config, weights), REPLAYED[shape])
    assert max(rounds) > 1


def rounds_from(w: World, index: int, num_known: int, num_new: int, tree: TreeShape) -> list[int]:
    """The replay's rounds of one answer, from its first num_known tokens on."""
    prompt, params = w.prompts[index], w.params[index]
    text = prompt + w.plain[index][:num_new]
    output, _ = full_forward(w.target, text, w.draft.boundaries)
    assert output.features_TF is not None and params.seed is not None
    replay = Replay(
        w.slow_draft, text, output.features_TF, seed=params.seed, temperature=params.temperature
    )
    return replay.rounds(len(prompt) + num_known - 1, tree)


@RUN_AHEAD
@pytest.mark.parametrize("shape", ["chain", "pruned tree"])
def test_speculation_switched_off_and_on_again(w: World, shape: str, run_ahead: int) -> None:
    """The draft's cache has no holes, and its first candidates are made anew (D1)."""
    tree, num_new = REPLAYED[shape], 40
    engine = make_engine(w.target, w.draft, worker_shape(tree), run_ahead=run_ahead)
    for index in (1, 9):
        engine.add(str(index), w.prompts[index], w.limited(num_new)[index])
    switch = {0: PLAIN, 8: tree, 11: PLAIN, 15: tree}
    tokens: dict[int, list[int]] = {1: [], 9: []}
    rounds: dict[int, list[int]] = {1: [], 9: []}
    for turn in range(200):
        engine.tree = switch.get(turn, engine.tree)
        for output in engine.step():
            index = int(output.request_id)
            tokens[index] += output.new_token_ids
            if output.num_rounds > len(rounds[index]):
                rounds[index].append(len(output.new_token_ids))
    for index in (1, 9):
        assert tokens[index] == w.plain[index][:num_new]
        assert rounds[index][:8] == [1] * 8 and rounds[index][11:15] == [1] * 4
        known = 1 + sum(rounds[index][:8])
        assert rounds[index][8:11] == rounds_from(w, index, known, num_new, tree)[:3]
        known = 1 + sum(rounds[index][:15])
        assert rounds[index][15:] == rounds_from(w, index, known, num_new, tree)


def test_a_request_without_speculation_beside_others(w: World) -> None:
    """Its rounds emit one token each; a newcomer with drafts accepts what it always does."""
    tree, num_new = REPLAYED["pruned tree"], 40
    engine = make_engine(w.target, w.draft, worker_shape(tree))
    params = w.limited(num_new)
    engine.add("1", w.prompts[1], dataclasses.replace(params[1], speculation=False))
    rounds: dict[str, list[int]] = {"1": [], "9": []}
    for turn in range(100):
        if turn == 5:
            engine.add("9", w.prompts[9], params[9])
        for output in engine.step():
            if output.num_rounds > len(rounds[output.request_id]):
                rounds[output.request_id].append(len(output.new_token_ids))
    assert rounds["1"] == [1] * (num_new - 1)
    assert rounds["9"] == rounds_from(w, 9, 1, num_new, tree) and max(rounds["9"]) > 1


def test_a_deeper_tree_with_the_same_beams_accepts_no_less(w: World) -> None:
    """An unpruned tree holds the chain of its best children: at least its acceptance (trap 9)."""
    params = w.limited(60)
    greedy = [i for i, p in enumerate(params) if p.temperature == 0]
    prompts, params = [w.prompts[i] for i in greedy], [params[i] for i in greedy]
    lengths = []
    for tree in (TreeShape(2, 1, 3), TreeShape(2, 3, 13), TreeShape(2, 7, 57)):
        results = run(make_engine(w.target, w.draft, worker_shape(tree)), prompts, params)
        lengths.append(sum(len(r.rounds) for r in results))
    assert lengths[0] > lengths[1] > lengths[2]


def ask(
    w: World,
    tree: TreeShape,
    params: SamplingParams,
    *,
    run_ahead: int = 0,
    eos: tuple[int, ...] = (),
    **shape: int,
) -> Generated:
    """The EDGE prompt, greedy, with a perfect draft."""
    engine = make_engine(
        w.target,
        scripted(w.texts) if tree.depth else None,
        worker_shape(tree, **shape),
        run_ahead=run_ahead,
        eos=eos,
    )
    (result,) = run(engine, [w.prompts[EDGE]], [params])
    return result


def unique_answer(w: World) -> list[int]:
    """The greedy EDGE answer, up to its first repetition of a token."""
    answer = w.plain[EDGE]
    end = next(i for i in range(len(answer)) if answer[i] in answer[:i])
    return answer[:end]


def new_stop(w: World, index: int) -> tuple[int, list[int]]:
    """A token that first occurs at `index` of the EDGE answer or later, and the answer up to it."""
    answer = w.plain[EDGE]
    end = next(i for i in range(index, len(answer)) if answer[i] not in answer[:i])
    return answer[end], answer[: end + 1]


@RUN_AHEAD
@pytest.mark.parametrize("tree", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_a_stop_token_at_every_offset_of_a_block(w: World, tree: TreeShape, run_ahead: int) -> None:
    """From the prefill's own token over every offset of two blocks, the bonus included."""
    ends = set()
    for index in range(2 * (K + 1) + 1):
        stop, expected = new_stop(w, index)
        params = SamplingParams(max_tokens=50, temperature=0, stop_token_ids=(stop,))
        result = ask(w, tree, params, run_ahead=run_ahead)
        assert result.tokens == expected
        assert result.finish is FinishReason.STOP
        block = tree.depth + 1
        whole, rest = divmod(len(expected) - 1, block)
        assert result.rounds == [block] * whole + [rest] * (rest > 0)
        ends.add((len(expected) - 1) % (K + 1))
    assert len(ends) >= K  # nearly all offsets have a token that is new there


@BOTH
def test_the_models_own_end_tokens_stop_too(w: World, tree: TreeShape) -> None:
    stop, expected = new_stop(w, 3)
    params = SamplingParams(max_tokens=50, temperature=0)
    result = ask(w, tree, params, eos=(stop, VOCAB - 1))
    assert (result.tokens, result.finish) == (expected, FinishReason.STOP)
    ignoring = dataclasses.replace(params, ignore_eos=True)
    result = ask(w, tree, ignoring, eos=(stop, VOCAB - 1))
    assert (result.tokens, result.finish) == (w.plain[EDGE][:50], FinishReason.LENGTH)


@BOTH
def test_an_end_token_past_the_vocabulary_is_never_met(w: World, tree: TreeShape) -> None:
    """Configs name such tokens; with min_tokens they must not be looked up among the logits."""
    stop, expected = new_stop(w, 3)
    params = SamplingParams(max_tokens=50, min_tokens=1, temperature=0)
    result = ask(w, tree, params, eos=(VOCAB, stop, VOCAB + 9))
    assert (result.tokens, result.finish) == (expected, FinishReason.STOP)


@RUN_AHEAD
@pytest.mark.parametrize("tree", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_max_tokens_at_every_offset_of_a_block(w: World, tree: TreeShape, run_ahead: int) -> None:
    for num_new in range(1, 2 * (K + 1) + 2):
        params = SamplingParams(max_tokens=num_new, temperature=0)
        result = ask(w, tree, params, run_ahead=run_ahead)
        assert result.tokens == w.plain[EDGE][:num_new]
        assert result.finish is FinishReason.LENGTH
        block = tree.depth + 1
        whole, rest = divmod(num_new - 1, block)
        assert result.rounds == [block] * whole + [rest] * (rest > 0)


@RUN_AHEAD
@BOTH
def test_the_earlier_of_stop_and_limit_wins(w: World, tree: TreeShape, run_ahead: int) -> None:
    """For all pairs in one block: a stop token which is also the last allowed one is a stop."""
    answer = unique_answer(w)[: K + 2]
    assert w.params[EDGE].temperature == 0
    assert len(answer) == K + 2  # the prefill's token and one whole block
    for stop_index in range(K + 2):
        for num_new in range(1, K + 3):
            params = SamplingParams(
                max_tokens=num_new, temperature=0, stop_token_ids=(answer[stop_index],)
            )
            result = ask(w, tree, params, run_ahead=run_ahead)
            stops = stop_index < num_new
            assert result.tokens == answer[: min(stop_index + 1, num_new)]
            assert result.finish is (FinishReason.STOP if stops else FinishReason.LENGTH)


def test_a_rejected_stop_token_stops_nothing(w: World) -> None:
    """Proposed everywhere and never chosen by the target."""
    prompt, answer = w.prompts[EDGE], w.plain[EDGE][:30]
    stop = next(token for token in range(VOCAB) if token not in answer)
    engine = make_engine(w.target, scripted([prompt + [stop] * 60]), worker_shape(CHAIN))
    params = SamplingParams(max_tokens=30, temperature=0, stop_token_ids=(stop,))
    (result,) = run(engine, [prompt], [params])
    assert (result.tokens, result.finish) == (answer, FinishReason.LENGTH)


@RUN_AHEAD
@pytest.mark.parametrize("page_size", [1, 2, 16])
@BOTH
def test_the_model_length_is_a_limit(
    w: World, tree: TreeShape, page_size: int, run_ahead: int
) -> None:
    """Up to the last position, for every room that is left; the page table ends there as well."""
    prompt = w.prompts[EDGE]
    for room in range(1, K + 4):
        result = ask(
            w,
            tree,
            SamplingParams(temperature=0),  # no max_tokens: up to the model length
            run_ahead=run_ahead,
            max_model_len=len(prompt) + room,
            page_size=page_size,
        )
        assert result.tokens == w.plain[EDGE][:room]
        assert result.finish is FinishReason.LENGTH


@RUN_AHEAD
@pytest.mark.parametrize("page_size", [1, 2, 16])
@BOTH
def test_as_few_pages_as_the_request_needs(
    w: World, tree: TreeShape, page_size: int, run_ahead: int
) -> None:
    """The last block may look past the last page; it must neither write nor need one more."""
    for prompt, answer in list(zip(w.prompts, w.plain, strict=True))[6:10]:
        for num_new in (1, 2, 17, 18):
            num_pages = -(-(len(prompt) + num_new) // page_size)
            shape = worker_shape(tree, page_size=page_size, num_pages=num_pages + 2)
            engine = make_engine(w.target, scripted([prompt + answer]), shape, run_ahead=run_ahead)
            index = w.prompts.index(prompt)
            (result,) = run(engine, [prompt], [w.limited(num_new)[index]])
            assert result.tokens == answer[:num_new]


@RUN_AHEAD
@BOTH
def test_requests_at_their_end_beside_others(w: World, tree: TreeShape, run_ahead: int) -> None:
    """Limits 1 to 8 and a stop in one batch, with drafts right, wrong and right again."""
    texts = []
    for index, text in enumerate(w.texts[:8]):
        wrong = wrong_sequence(w.prompts[index], w.plain[index])
        cut = len(w.prompts[index]) + index
        texts.append(text if index % 2 else text[:cut] + wrong[cut : cut + 3] + text[cut + 3 :])
    params = [dataclasses.replace(p, max_tokens=n) for n, p in enumerate(w.params[:8], start=1)]
    stop = w.plain[7][4]
    params[7] = dataclasses.replace(params[7], max_tokens=40, stop_token_ids=(stop,))
    engine = make_engine(w.target, scripted(texts), worker_shape(tree), run_ahead=run_ahead)
    results = run(engine, w.prompts[:8], params)
    for number, result in enumerate(results[:7]):
        assert result.tokens == w.plain[number][: number + 1]
        assert result.finish is FinishReason.LENGTH
    end = w.plain[7].index(stop) + 1
    assert (results[7].tokens, results[7].finish) == (w.plain[7][:end], FinishReason.STOP)


@BOTH
def test_a_draft_that_is_right_up_to_a_position(w: World, tree: TreeShape) -> None:
    """Wrong from offset j of every block on: rounds of j + 1 tokens."""
    prompt, answer = w.prompts[EDGE], w.plain[EDGE]
    wrong = wrong_sequence(prompt, answer)
    for right in range(K + 1):
        script, position = list(prompt), len(prompt)
        while position < len(prompt) + 61:  # pending, then `right` good proposals, then a bad one
            script += [*prompt, *answer][position : position + right + 1]
            position += right + 1
        # The bonus token of a round is the next one's pending: mark it wrong as a proposal.
        for bonus in range(len(prompt) + right + 1, len(script), right + 1):
            script[bonus] = wrong[bonus]
        engine = make_engine(w.target, scripted([script]), worker_shape(tree))
        num_new = 1 + 5 * (right + 1)
        params = SamplingParams(max_tokens=num_new, temperature=0)
        (result,) = run(engine, [prompt], [params])
        assert result.tokens == answer[:num_new]
        assert result.rounds == [right + 1] * 5
