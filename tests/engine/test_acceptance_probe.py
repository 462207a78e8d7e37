"""The start-up probe: right boundaries are silent, wrong ones are named with the better ones."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.slow_draft import Entry, SlowDraft
from fixtures.tiny import (
    VOCAB,
    fit_head,
    full_forward,
    make_engine,
    random_prompts,
    run,
    scripted,
    tiny_draft_and_weights,
    tiny_target,
    worker_shape,
)
from fixtures.tiny_pair import write_pair

from eyas.config import PLAIN, EngineConfig, TreeShape
from eyas.engine import acceptance_probe
from eyas.engine.acceptance_probe import (
    BoundaryScore,
    neighbours,
    probe_token_ids,
    report_better,
    score_boundaries,
)
from eyas.engine.engine import Engine
from eyas.engine.llm import LLM
from eyas.engine.serving_load import load_for_serving
from eyas.engine.tokenizer import Tokenizer
from eyas.models.embedded import resolve_model
from eyas.models.findings import Findings
from eyas.types import SamplingParams, Severity

CODE = "boundaries-neighbour-better"
RIGHT = (2, 15, 27)  # of the draft that ships
CHAIN = TreeShape(3, 1, 4)


def score(hits: list[bool], log_probs: list[float], boundaries: tuple[int, ...]) -> BoundaryScore:
    return BoundaryScore(boundaries, torch.tensor(hits), torch.tensor(log_probs))


@functools.cache
def texts() -> list[list[int]]:
    return random_prompts([200, 160, 150], seed=8)


def fitted_engine(boundaries: tuple[int, ...] | None = None, **changes: int) -> Engine:
    """A draft whose head is fitted to these texts by boundaries (1, 2, 4), made to read others."""
    target = tiny_target()
    draft, _ = tiny_draft_and_weights(target)
    fit_head(draft, target, texts())
    if boundaries is not None:
        draft.config = dataclasses.replace(draft.config, boundaries=boundaries)
    return make_engine(target, draft, worker_shape(CHAIN, **changes))


def codes(engine: Engine, *, chunk_tokens: int = 64) -> list[str]:
    findings = Findings()
    scores = score_boundaries(engine.worker, texts()[0], chunk_tokens=chunk_tokens)
    report_better(scores[0], scores[1:], findings)
    return [str(finding) for finding in findings]


def test_neighbours_stay_within_the_target() -> None:
    assert neighbours((2, 15, 27), 30) == [
        (1, 14, 26),
        (1, 15, 27),
        (2, 14, 27),
        (2, 15, 26),
        (3, 16, 28),
        (3, 15, 27),
        (2, 16, 27),
        (2, 15, 28),
    ]
    assert neighbours((0, 1, 4), 4) == [(0, 1, 3), (0, 2, 4)]
    assert neighbours((0,), 4) == [(1,)]


def test_the_scores_are_those_of_a_draft_run_row_by_row() -> None:
    target, tokens = tiny_target(), random_prompts([90], seed=21)[0]
    draft, weights = tiny_draft_and_weights(target)
    engine = make_engine(target, draft, worker_shape(CHAIN))
    scores = score_boundaries(engine.worker, tokens, chunk_tokens=32)
    assert [s.boundaries for s in scores] == [(1, 2, 4), *neighbours((1, 2, 4), 4)]
    slow = SlowDraft(draft.config, weights)
    for found in (scores[0], scores[2]):
        output, _ = full_forward(target, tokens, found.boundaries)
        assert output.features_TF is not None
        choices = target.compute_logits(output.hidden_TH).argmax(-1).tolist()
        past: list[Entry] = []
        hits, log_probs = [], []
        for t in range(len(tokens) - 1):
            hidden = slow.combine(output.features_TF[t])
            step = slow.step(tokens[t + 1], hidden, t, past=past)
            past.append(step.entry)
            if choices[t + 1] in slow.target_ids:
                wanted = slow.target_ids.index(choices[t + 1])
                hits.append(int(step.logits.argmax()) == wanted)
                log_probs.append(float(step.logits.log_softmax(-1)[wanted]))
        assert found.hit_T.tolist() == hits
        torch.testing.assert_close(found.log_prob_T, torch.tensor(log_probs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk_tokens", [64, 512])
def test_right_boundaries_are_silent_and_wrong_ones_are_named(chunk_tokens: int) -> None:
    assert codes(fitted_engine(), chunk_tokens=chunk_tokens) == []
    (text,) = codes(fitted_engine((0, 1, 3)), chunk_tokens=chunk_tokens)
    assert "reads boundaries [0, 1, 3], and [1, 2, 4] suit it better" in text
    assert "--draft-boundaries 1,2,4" in text and f"[pair] {CODE}" in text


@pytest.mark.parametrize(
    ("num_positions", "gain", "warns"),
    [
        (400, 0.3, True),
        (400, 0.0, False),
        (400, -0.3, False),
        (400, 0.04, False),  # certain and too small to matter
        (20, 0.3, False),  # large and not certain
    ],
)
def test_a_warning_needs_a_gain_that_is_certain_and_matters(
    num_positions: int, gain: float, warns: bool
) -> None:
    generator = torch.Generator().manual_seed(4)
    noise_T = torch.randn(num_positions, generator=generator) * min(1.0, 10 * abs(gain))
    noise_T -= noise_T.mean()
    hits = [i % 3 == 0 for i in range(num_positions)]
    more = [hit or i % 20 == 1 for i, hit in enumerate(hits)]
    base = score(hits, [-2.0] * num_positions, (1, 2))
    other = score(more, (-2.0 + gain + noise_T).tolist(), (2, 3))
    assert other.gain_over(base)[0] == pytest.approx(gain, abs=1e-6)
    findings = Findings()
    report_better(base, [other], findings)
    assert len(findings) == warns
    same_hits = score(hits, (-2.0 + gain + noise_T).tolist(), (2, 3))
    report_better(base, [same_hits], findings)
    assert len(findings) == warns  # no more hits, no warning


def test_the_best_of_several_better_ones_is_named() -> None:
    base = score([False] * 100, [-3.0, -2.0] * 50, (3, 4))
    better = score([True] * 100, [-2.0, -1.5] * 50, (2, 4))
    best = score([True] * 100, [-1.0, -1.1] * 50, (2, 3))
    findings = Findings()
    report_better(base, [better, best], findings)
    assert [f.severity for f in findings] == [Severity.WARNING]
    message = findings[0].message
    assert "[2, 3] suit it better: at 100 positions" in message
    assert "100.0% instead of 0.0%" in message and "-1.05 instead of -2.50" in message


def test_nothing_is_left_behind() -> None:
    prompts = random_prompts([5, 40], seed=2)
    params = [SamplingParams(max_tokens=30, temperature=0.7, seed=i) for i in range(2)]
    fresh, probed = fitted_engine(), fitted_engine()
    assert codes(probed) == []
    assert probed.worker.runner.target.captured_boundaries == (1, 2, 4)
    expected = run(fresh, prompts, params)
    assert run(probed, prompts, params) == expected  # asserts that no page or slot is held


def test_where_there_is_nothing_to_run() -> None:
    target = tiny_target()
    plain = make_engine(target, None, worker_shape(PLAIN))
    assert score_boundaries(plain.worker, texts()[0], chunk_tokens=64) == []
    engine = fitted_engine()
    assert score_boundaries(engine.worker, texts()[0][:40], chunk_tokens=64) == []
    assert score_boundaries(engine.worker, [*texts()[0], VOCAB], chunk_tokens=64) == []
    few_pages = fitted_engine(num_pages=5)
    assert score_boundaries(few_pages.worker, texts()[0], chunk_tokens=64) == []
    short = fitted_engine(max_model_len=120)
    (first, *_) = score_boundaries(short.worker, texts()[0], chunk_tokens=64)
    assert 64 <= len(first.hit_T) <= 119


def test_a_scripted_draft_reads_nothing_and_is_left_alone() -> None:
    target = tiny_target()
    engine = make_engine(target, scripted([texts()[0]]), worker_shape(CHAIN))
    assert codes(engine) == []


def test_the_setting_and_a_missing_draft_leave_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = map(str, write_pair(tmp_path))
    calls = []

    def counted(*args: object, **settings: object) -> list[BoundaryScore]:
        calls.append(args)
        return []

    monkeypatch.setattr(acceptance_probe, "score_boundaries", counted)
    LLM(target, draft=draft, max_model_len=512, acceptance_probe=False)
    LLM(target, max_model_len=512)
    assert calls == []
    LLM(target, draft=draft, max_model_len=512)
    assert len(calls) == 1
    load_for_serving(EngineConfig(model=target, draft=draft), lambda *_: None)
    assert len(calls) == 2
    config = EngineConfig(model=target, draft=draft, acceptance_probe=False)
    load_for_serving(config, lambda *_: None)
    assert len(calls) == 2


def test_the_text_is_a_chat_where_there_is_a_template(smollm2_dir: Path, tmp_path: Path) -> None:
    chat = Tokenizer(smollm2_dir)
    token_ids = probe_token_ids(chat)
    assert 300 < len(token_ids) < 512
    assert "assistant\nA lighthouse is a tower" in chat.decode(token_ids)
    target, _ = write_pair(tmp_path)
    plain = Tokenizer(target)
    plain._tokenizer.chat_template = None
    assert "be seen?\n\nA lighthouse is a tower" in plain.decode(probe_token_ids(plain))


def shifted_draft(folder: Path, ids: list[int]) -> str:
    """The draft that ships, its config.json naming other layers."""
    shipped = resolve_model("smollm2-135m-eagle3")
    config = json.loads((shipped / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(shipped / "model.safetensors")
    return str(folder)


def test_the_shipped_draft_is_silent(
    smollm2_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = []

    def timed(*args: object, **settings: object) -> list[BoundaryScore]:
        start = time.thread_time()
        try:
            return score_boundaries(*args, **settings)  # type: ignore[arg-type]
        finally:
            seconds.append(time.thread_time() - start)

    monkeypatch.setattr(acceptance_probe, "score_boundaries", timed)
    with caplog.at_level(logging.WARNING):
        llm = LLM("smollm2-135m", max_model_len=512, max_batch_size=1)
    assert llm.report.draft is not None and llm.report.draft.boundaries == RIGHT
    assert llm.report.findings == () and caplog.records == []
    assert 0 < seconds[0] < 3  # half a second; of one thread, so that a busy machine fails none


@pytest.mark.parametrize("ids", [[0, 13, 25], [2, 15, 27]])
def test_the_shipped_draft_with_its_ids_shifted_is_warned_of(
    ids: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """[2, 15, 27] would be taken as boundaries already, so the override stands in for a shift."""
    shift: dict[str, Any] = {}
    if ids == list(RIGHT):
        shift = {"draft_boundaries": (3, 16, 28)}
    draft = shifted_draft(tmp_path, ids)
    with caplog.at_level(logging.WARNING):
        llm = LLM("smollm2-135m", draft=draft, max_model_len=512, max_batch_size=1, **shift)
    (finding,) = [f for f in llm.report.findings if f.code == CODE]
    wrong = [3, 16, 28] if shift else [1, 14, 26]
    assert f"reads boundaries {wrong}, and [2, 15, 27] suit it better" in finding.message
    assert "--draft-boundaries 2,15,27" in finding.hint
    assert [r.getMessage() for r in caplog.records] == [str(finding)]
    if not shift:  # what serve logs
        config = EngineConfig(model="smollm2-135m", draft=draft, max_model_len=512)
        _, loaded = load_for_serving(config, lambda *_: None)
        assert [w.code for w in loaded.warnings] == ["boundaries-guessed", CODE]
