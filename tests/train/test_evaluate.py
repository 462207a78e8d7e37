"""Acceptance as the engine counts it: by position, by prompt set, looping answers apart."""

import json
import math
from pathlib import Path

import pytest
from fixtures.tiny import make_engine, random_prompts, run, scripted, tiny_target, worker_shape
from fixtures.tiny_pair import write_pair

from eyas.config import TreeShape
from eyas.engine.llm import LLM
from eyas.train.batching import Answer, is_looping
from eyas.train.evaluate import (
    ALL,
    Acceptance,
    Evaluation,
    HeldOut,
    ModeResult,
    evaluate,
    to_dict,
    to_markdown,
)
from eyas.train.masks import ChatTemplate
from eyas.train.prompts import Prompt
from eyas.train.stage_settings import EvaluateSettings, Placement
from eyas.types import EyasError, FinishReason, SamplingParams, StepOutput

SETTINGS = EvaluateSettings(chain=2, tree=(3, 2, 8), temperatures=(0.0, 1.0), max_new_tokens=14)
PROMPTS = [Prompt((f"question {i}",), "ab"[i % 2]) for i in range(6)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


def answer(counts: tuple[int, ...], *, rounds: int, tokens: int) -> Answer:
    last = StepOutput(
        "x",
        (),
        FinishReason.STOP,
        num_rounds=rounds,
        num_round_tokens=tokens,
        accepted_counts=counts,
    )
    return Answer([], last)


def test_rates_are_shares_of_rounds() -> None:
    acceptance = Acceptance()
    assert math.isnan(acceptance.length)
    acceptance.add(answer((4, 3, 2, 1), rounds=10, tokens=20))
    acceptance.add(answer((9, 1), rounds=10, tokens=11))
    assert acceptance.length == 31 / 20
    assert acceptance.rates() == [7 / 20, 3 / 20, 1 / 20]
    # Every round emits its accepted tokens and one more.
    assert 1 + sum(acceptance.rates()) == acceptance.length


def test_the_engine_counts_accepted_tokens_by_round() -> None:
    """A draft that is right up to a point: K accepted a round before it, none after."""
    target = tiny_target()
    (prompt,) = random_prompts([9])
    params = SamplingParams(max_tokens=25, temperature=0)
    (plain,) = run(make_engine(target), [prompt], [params])
    right = plain.tokens[:13]
    wrong = [(token + 32) % 64 for token in plain.tokens[13:]]
    draft = scripted([[*prompt, *right, *wrong]])
    shape = worker_shape(TreeShape(3, 1, 4))
    engine = make_engine(target, draft, shape)
    engine.add("x", prompt, params)
    last = None
    emitted = []
    while engine.has_work:
        for output in engine.step():
            last = output
            emitted.append(len(output.new_token_ids))
    assert last is not None and last.finish_reason is FinishReason.LENGTH
    # The prefill emits one token, three rounds four each, then one a round.
    assert emitted == [1, 4, 4, 4] + [1] * 12
    assert last.accepted_counts == (12, 0, 0, 3)
    assert (last.num_rounds, last.num_round_tokens) == (15, 24)


def test_tokens_cut_by_a_limit_do_not_count() -> None:
    target = tiny_target()
    (prompt,) = random_prompts([9])
    (plain,) = run(make_engine(target), [prompt], [SamplingParams(max_tokens=25, temperature=0)])
    engine = make_engine(
        target, scripted([[*prompt, *plain.tokens]]), worker_shape(TreeShape(3, 1, 4))
    )
    engine.add("x", prompt, SamplingParams(max_tokens=7, temperature=0))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [len(o.new_token_ids) for o in outputs] == [1, 4, 2]
    assert outputs[-1].accepted_counts == (0, 0, 1, 1)


def test_all_modes_agree_with_the_engine(pair: tuple[Path, Path]) -> None:
    target, draft = map(str, pair)
    shown: list[tuple[int, int]] = []
    result = evaluate(
        target,
        draft,
        PROMPTS,
        SETTINGS,
        placement=Placement(device="cpu"),
        max_model_len=512,
        on_done=lambda done, total: shown.append((done, total)),
    )
    assert shown == [(i, 24) for i in range(1, 25)]
    assert [(m.mode.shape, m.mode.temperature) for m in result.modes] == [
        (shape, t) for t in (0.0, 1.0) for shape in (TreeShape(2, 1, 3), TreeShape(3, 2, 8))
    ]
    chain = LLM(target, draft=draft, device="cpu", num_speculative_tokens=2, max_model_len=512)
    prompts = [chain.tokenizer.render_chat(p.messages()) for p in PROMPTS]
    for mode in (result.modes[0], result.modes[2]):
        params = [
            SamplingParams(max_tokens=14, temperature=mode.mode.temperature, seed=i)
            for i in range(len(PROMPTS))
        ]
        expected = {"a": Acceptance(), "b": Acceptance()}
        num_looping = 0
        for prompt, output in zip(PROMPTS, chain.generate(prompts, params), strict=True):
            if is_looping(output.token_ids):
                num_looping += 1
                continue
            one = expected[prompt.source]
            counts = output.accepted_counts
            one.add(answer(counts, rounds=output.num_rounds, tokens=output.num_round_tokens))
        assert {n: a for n, a in mode.by_source.items() if n != ALL} == {
            n: a for n, a in expected.items() if a.num_answers
        }
        assert mode.looping[ALL].num_answers == num_looping
        assert mode.by_source[ALL].num_answers == len(PROMPTS) - num_looping
    data = json.loads(json.dumps(to_dict(result), allow_nan=False))
    assert data["modes"][2]["by_source"][ALL]["rates"] == result.modes[2].by_source[ALL].rates()


def test_the_table_shows_every_mode_and_set() -> None:
    modes = SETTINGS.modes()
    by_source = {"a": Acceptance(2, 10, 25, [2, 3, 5]), ALL: Acceptance(2, 10, 25, [2, 3, 5])}
    looping = {"a": Acceptance(1, 5, 15, [0, 0, 5]), ALL: Acceptance(1, 5, 15, [0, 0, 5])}
    nothing = {ALL: Acceptance()}
    results = [
        ModeResult(modes[0], by_source, looping),
        ModeResult(modes[1], nothing, {ALL: Acceptance()}),
    ]
    evaluation = Evaluation(SETTINGS, 3, 0, results)
    lines = to_markdown(evaluation).splitlines()
    assert "| prompts | chain of 2, T = 0 | tree of 8, depth 3, T = 0 |" in lines
    assert "| a | 2.50 (2) | – |" in lines and "| **all** | 2.50 (2) | – |" in lines
    assert "| looping answers, not counted above | 3.00 (1) | – |" in lines
    assert "| chain of 2, T = 0 | 0.800 | 0.500 |  |" in lines
    assert "| tree of 8, depth 3, T = 0 | – | – | – |" in lines
    assert evaluation.length() == 2.5
    results[0].by_source = {ALL: Acceptance(2, 10, 10, [10])}  # nothing drafted was right
    assert "| chain of 2, T = 0 | 0.000 | 0.000 |  |" in to_markdown(evaluation).splitlines()
    results[0].by_source = nothing
    assert evaluation.length() == 3.0  # nothing but loops


def test_long_prompts_are_left_out(pair: tuple[Path, Path]) -> None:
    template = ChatTemplate.open(pair[0])
    prompts = [Prompt(("short",), "a"), Prompt(("long " * 30,), "a")]
    held_out = HeldOut.render(template, prompts, max_prompt_tokens=60)
    assert (len(held_out.prompts), held_out.num_skipped) == (1, 1)
    with pytest.raises(EyasError, match="lower --eval-tokens"):
        HeldOut.render(template, prompts, max_prompt_tokens=5)


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(EyasError, match="at least 2"):
        EvaluateSettings(max_new_tokens=1)
    with pytest.raises(EyasError, match="must be at least the chain's 5"):
        EvaluateSettings(chain=5, tree=(3, 2, 8))
