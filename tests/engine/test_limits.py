"""Nothing leaks, and every limit of length, position and page is met to the token."""

import dataclasses
import random

import pytest
import torch
from fixtures.replay import Replay
from fixtures.sampling_world import (
    GREEDY,
    MIXED,
    SAMPLED,
    SHAPES,
    TREE,
    Answer,
    ask,
    cases,
    collect,
)
from fixtures.slow_draft import SlowDraft
from fixtures.tiny import (
    VOCAB,
    assert_idle,
    draft_config,
    full_forward,
    llama_config,
    load_named,
    make_engine,
    random_prompts,
    scripted,
    tiny_draft,
    tiny_draft_and_weights,
    tiny_target,
    worker_shape,
)
from fixtures.world import World, world

from eyas.cache.pool import NUM_RESERVED_PAGES
from eyas.config import PLAIN, TreeShape
from eyas.models.config import RopeConfig
from eyas.models.eagle3 import Eagle3Draft
from eyas.types import EyasError, FinishReason, SamplingParams

CHAIN = SHAPES["chain"]
KINDS = [*GREEDY[:3], *SAMPLED[:3], *MIXED[4:9]]


@pytest.fixture(scope="module")
def w() -> World:
    return world()


@pytest.mark.parametrize(
    ("page_size", "num_pages", "run_ahead"), [(1, 160, 1), (16, 14, 0), (64, 7, 1)]
)
def test_a_thousand_requests_and_aborts_leave_nothing(
    page_size: int, num_pages: int, run_ahead: int
) -> None:
    """sglang-jax#1147, sglang PR#13826: slots leaked. 30 % are aborted at a random
    step (queued, in a prompt, in a round); pages are short enough to preempt."""
    chooser = random.Random(page_size)
    target = tiny_target(llama_config(num_layers=1))
    draft = tiny_draft(target, draft_config(boundaries=(0, 1)))
    engine = make_engine(
        target,
        draft,
        worker_shape(CHAIN, page_size=page_size, num_pages=num_pages + NUM_RESERVED_PAGES),
        run_ahead=run_ahead,
        chunk_tokens=24,
    )
    allocator, scheduler = engine.scheduler.allocator, engine.scheduler
    num_added, num_aborted, num_steps, ended, lowest = 0, 0, 0, 0, num_pages
    doomed: dict[str, int] = {}
    heads = random_prompts([16, 20], seed=1)
    while num_added < 1000 or engine.has_work:
        while num_added < 1000 and len(engine.requests) < 9:
            tail = random_prompts([chooser.randint(1, 6)], seed=num_added)[0]
            prompt = [*chooser.choice([[], *heads]), *tail]
            params = dataclasses.replace(
                chooser.choice(KINDS), max_tokens=chooser.randint(1, 8), min_tokens=0
            )
            engine.add(str(num_added), prompt, params)
            if chooser.random() < 0.42:
                doomed[str(num_added)] = num_steps + chooser.randint(0, 5)
            num_added += 1
        for request_id in [r for r, step in doomed.items() if step == num_steps]:
            num_aborted += request_id in engine.requests
            engine.abort(request_id)  # unless it has ended already
        num_steps += 1
        ended += sum(output.finish_reason is not None for output in engine.step())
        held = {page for request in scheduler.admitted for page in request.pages}
        assert allocator.num_free == num_pages - len(held)
        lowest = min(lowest, allocator.num_free)
    assert ended + num_aborted == 1000 and 250 < num_aborted < 400
    assert lowest < num_pages // 3
    assert_idle(engine)


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_up_to_the_last_position(w: World, k: int, run_ahead: int) -> None:
    """Eight requests with every option reach the model length at different steps (vLLM PR#49027,
    TensorRT-LLM#16826): nobody gets a token more or less, and the last is plain decoding's."""
    c, tree = cases("mixed"), TreeShape(k, 1, k + 1)
    length = max(map(len, c.prompts)) + 4
    free = [dataclasses.replace(p, max_tokens=None, min_tokens=0) for p in c.params]
    free = [dataclasses.replace(p, stop_token_ids=()) for p in free]
    chosen = [i for i, prompt in enumerate(c.prompts) if length - len(prompt) < 60]
    prompts, params = [c.prompts[i] for i in chosen], [free[i] for i in chosen]
    shape = worker_shape(PLAIN, max_model_len=length)
    plain = ask(make_engine(w.target, None, shape), prompts, params)
    assert [len(a.tokens) for a in plain] == [length - len(p) for p in prompts]
    texts = [p + a.tokens for p, a in zip(prompts, plain, strict=True)]
    for draft in (w.draft, scripted(texts)):
        engine = make_engine(
            w.target, draft, worker_shape(tree, max_model_len=length), run_ahead=run_ahead
        )
        answers = ask(engine, prompts, params)
        assert [a.tokens for a in answers] == [a.tokens for a in plain]
        assert {a.finish for a in answers} == {FinishReason.LENGTH}


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_prompt_just_under_the_limit(w: World, tree: TreeShape) -> None:
    """One token short of the model length, at it, past it; k drafted rows need no room."""
    (prompt,) = random_prompts([64], seed=9)
    greedy = SamplingParams(temperature=0)
    engine = make_engine(w.target, w.draft, worker_shape(tree, max_model_len=64), run_ahead=1)
    (answer,) = ask(engine, [prompt[:63]], [greedy])
    assert len(answer.tokens) == 1 and answer.finish is FinishReason.LENGTH
    assert answer.tokens == ask(make_engine(w.target), [prompt[:63]], [greedy])[0].tokens[:1]
    with pytest.raises(EyasError, match="the prompt has 64 tokens, the model length is 64"):
        engine.add("a", prompt, greedy)
    with pytest.raises(EyasError, match="60 prompt tokens and max_tokens 5 exceed.*at most 4"):
        engine.add("a", prompt[:60], dataclasses.replace(greedy, max_tokens=5))
    assert_idle(engine)


@pytest.mark.parametrize("num_prompt", [20, 30, 31, 32, 33, 60])
def test_past_the_drafts_own_positions(w: World, num_prompt: int) -> None:
    """A draft of 32 positions for a target of 320 (llama.cpp#24541, vLLM PR#24662): prompts on both
    sides and in mid-answer. Its rotary table goes on; acceptance is a longer draft's."""
    short = dataclasses.replace(w.draft.config.decoder, max_position_embeddings=32)
    config = dataclasses.replace(w.draft.config, decoder=short)
    draft = Eagle3Draft(config, dtype=torch.float32, device="cpu", max_model_len=320)
    own = {name for name, _ in draft.named_parameters()} | {
        f"layers.0.{part}_proj.weight"
        for part in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    }
    load_named(draft, {name: value for name, value in w.draft_weights.items() if name in own})
    draft.d2t.copy_(w.draft_weights["d2t"])
    draft.share_with_target(w.target)
    (prompt,) = random_prompts([num_prompt], seed=13)
    params = [SamplingParams(temperature=1, seed=3, max_tokens=30)]
    shape = worker_shape(TREE)
    (plain,) = ask(make_engine(w.target), [prompt], params)
    (answer,) = ask(make_engine(w.target, draft, shape), [prompt], params)
    (usual,) = ask(make_engine(w.target, w.draft, shape), [prompt], params)
    assert answer.tokens == plain.tokens
    assert answer.rounds == usual.rounds and max(usual.rounds) > 1


@pytest.mark.parametrize(("target_base", "draft_base"), [(1e6, 1e4), (1e4, 5e5)])
def test_the_draft_has_a_rotary_base_of_its_own(target_base: float, draft_base: float) -> None:
    """vllm-ascend#6612: one table for both. The first candidates and their scores equal those of a
    stand-alone draft at position 90, which with the target's base would be others."""
    target = tiny_target(llama_config(rope=RopeConfig(theta=target_base)))
    decoder = llama_config(
        num_layers=1, num_heads=3, num_kv_heads=1, head_dim=10, rope=RopeConfig(theta=draft_base)
    )
    config = draft_config(decoder)
    draft, weights = tiny_draft_and_weights(target, config, seed=6)
    engine = make_engine(target, draft, worker_shape(TREE))
    engine._launch_round = lambda: None  # type: ignore[method-assign]
    (prompt,) = random_prompts([90], seed=15)
    engine.add("a", prompt, SamplingParams(temperature=1, seed=2, max_tokens=9))
    while not engine.requests["a"].output_token_ids:
        engine.step()
    text, state = engine.requests["a"].token_ids, engine.worker.state
    output, _ = full_forward(target, text, draft.boundaries)
    assert output.features_TF is not None
    wrong = dataclasses.replace(decoder, rope=RopeConfig(theta=target_base))
    scores = []
    for base in (decoder, wrong):
        slow = SlowDraft(dataclasses.replace(config, decoder=base), weights)
        replay = Replay(slow, text, output.features_TF, seed=2, temperature=1)
        root = slow.step(text[-1], replay.states[89], 89, past=replay.entries[:89])
        scores.append(dict(replay.children(root.logits, 91, 41)))
    tokens = state.candidate_token_SK[0].tolist()
    assert tokens == list(scores[0])[:3]
    found = state.candidate_score_SK[0].tolist()
    assert found == pytest.approx([scores[0][t] for t in tokens], abs=1e-3)
    assert max(abs(f - scores[1][t]) for f, t in zip(found, tokens, strict=True)) > 1e-2


@pytest.mark.parametrize("num_slots", [1, 3])
def test_acceptance_counts_are_those_of_the_text(w: World, num_slots: int) -> None:
    """Tokens of rounds and the prefill's own one make the answer, with stops, limits and aborts;
    a perfect draft gives K + 1 a round, a null draft exactly one (trap 19)."""
    c, block = cases("sampled"), TREE.depth + 1
    wrong = [[*p, *[(t + 32) % VOCAB for t in a.tokens]] for p, a in zip(c.prompts, c.plain)]  # noqa: B905
    for draft, expected in ((scripted(c.texts), block), (scripted(wrong), 1)):
        engine = make_engine(w.target, draft, worker_shape(TREE, num_slots=num_slots))
        outputs: dict[str, Answer] = {}
        for index, (prompt, params) in enumerate(zip(c.prompts, c.params, strict=True)):
            outputs[str(index)] = Answer()
            engine.add(str(index), prompt, dataclasses.replace(params, max_tokens=1 + 3 * block))
        while engine.has_work:
            for output in engine.step():
                collect(outputs[output.request_id], output)
        for answer, plain in zip(outputs.values(), c.plain, strict=True):
            assert answer.tokens == plain.tokens[: 1 + 3 * block]
            assert answer.rounds == [expected] * (3 * block // expected)
