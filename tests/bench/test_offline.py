"""The whole benchmark over a tiny model, against transformers."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from fixtures.tiny_pair import write_pair
from rich.console import Console

from eyas.bench import bandwidth, offline
from eyas.bench.contenders import Contender, EyasContender
from eyas.bench.offline import OfflineSettings, run_offline, without_draft
from eyas.bench.report import describe_check, render, to_json
from eyas.bench.results import OfflineResult, Sample
from eyas.config import ConfigError, EngineConfig
from eyas.types import EyasError


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    return str(target), str(draft)


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bandwidth._BUFFER_BYTES, "cpu", 2**20)


@pytest.fixture(scope="module")
def result(pair: tuple[str, str]) -> OfflineResult:
    target, draft = pair
    settings = OfflineSettings(
        engine=EngineConfig(model=target, draft=draft, num_speculative_tokens=2),
        batch_sizes=(1, 3),
        prompt_tokens=40,
        new_tokens=24,
        num_prompts=3,
        against_transformers=True,
        repeats=2,
        threads=1,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bandwidth._BUFFER_BYTES, "cpu", 2**20)
        return run_offline(settings)


def test_all_contenders_say_the_same(result: OfflineResult) -> None:
    assert result.ok and result.must_agree
    for batch in result.batches:
        names = [(check.contender, check.reference) for check in batch.checks]
        draft = "eyas + chain of 2"
        assert names == [("eyas", "transformers"), (draft, "transformers"), (draft, "eyas")]
        assert [check.num_equal for check in batch.checks] == [3, 3, 3]


def test_what_is_measured(result: OfflineResult) -> None:
    assert result.baseline == "transformers"
    assert (result.prompt_tokens, result.dtype, result.threads) == ((40, 40), "float32", 1)
    assert [batch.batch_size for batch in result.batches] == [1, 3]
    for batch in result.batches:
        assert batch.distinct_bigrams[1] == 3 * 23
        plain, draft, transformers = batch.results
        assert transformers.ratio is None and transformers.acceptance is None
        assert plain.ratio is not None and plain.acceptance is None
        assert draft.acceptance is not None and draft.acceptance.num_outputs == 3
        for one in batch.results:
            assert 0 < one.decode.least <= one.decode.median <= one.decode.most
            assert one.whole.median > 0 and one.first_token_seconds.least > 0


def test_a_random_draft_accepts_next_to_nothing(result: OfflineResult) -> None:
    draft = result.batches[0].results[1]
    assert draft.acceptance is not None
    if draft.acceptance.length is not None:
        assert 1.0 <= draft.acceptance.length < 1.5


def test_json(result: OfflineResult) -> None:
    data = json.loads(to_json(result, command="eyas bench offline tiny"))
    assert data["command"] == "eyas bench offline tiny"
    assert {"date", "machine", "versions", "bandwidth", "batches", "ok"} <= set(data)
    assert data["versions"]["torch"] == torch.__version__
    assert data["machine"]["cpu"]
    assert data["batches"][1]["results"][0]["decode"]["median"] > 0


@pytest.mark.parametrize("width", [80, 200])
def test_table(result: OfflineResult, width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    render(result, console)
    text = console.export_text()
    assert "eyas + chain of 2" in text and "transformers" in text
    assert "…" not in text
    assert "same tokens in all 3 outputs" in text
    tables = [line for line in text.splitlines() if line[:4] in ("eyas", "tran", "    ")]
    assert len(tables) > 6 and max(map(len, tables)) <= width


def test_a_wrong_contender_is_caught(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(EyasContender):
        def run(self, prompts: list[list[int]], num_new: int) -> Sample:
            sample = super().run(prompts, num_new)
            if self.drafts:
                sample.token_ids[0][5] ^= 1
            return sample

    monkeypatch.setattr(offline, "EyasContender", Wrong)
    target, draft = pair
    settings = OfflineSettings(
        engine=EngineConfig(model=target, draft=draft), new_tokens=12, repeats=1, prompt_tokens=32
    )
    found = run_offline(settings)
    (check,) = found.batches[0].checks
    assert not found.ok
    assert (check.prompt, check.position, check.logit_gap) == (0, 5, None)
    assert "WRONG" in describe_check(check, must_agree=True)
    assert "WRONG" not in describe_check(check, must_agree=False)
    narrow = dataclasses.replace(found, dtype="bfloat16")
    assert narrow.ok


def test_contenders_take_turns_in_a_rotating_order(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Noted(EyasContender):
        def run(self, prompts: list[list[int]], num_new: int) -> Sample:
            order.append("draft" if self.drafts else "plain")
            return super().run(prompts, num_new)

    monkeypatch.setattr(offline, "EyasContender", Noted)
    target, draft = pair
    settings = OfflineSettings(
        engine=EngineConfig(model=target, draft=draft), new_tokens=12, repeats=2, prompt_tokens=32
    )
    steps: list[tuple[int, int]] = []
    run_offline(settings, on_run=lambda done, total: steps.append((done, total)))
    assert order == ["plain", "draft", "draft", "plain", "plain", "draft"]
    assert steps == [(n, 6) for n in range(1, 7)]


def test_prompts_are_computed_anew_in_each_run(pair: tuple[str, str]) -> None:
    engine = EngineConfig(model=pair[0])
    settings = OfflineSettings(engine=engine, new_tokens=12, repeats=2, prompt_tokens=64)
    bench = offline._Bench(settings, None, lambda done, total: None)
    contender: Contender = bench.contenders[0]
    for _ in range(2):  # an assertion inside fails on a token from the prefix cache
        contender.run(bench.prompts, 12)


def test_prompts_of_a_file_keep_their_lengths(pair: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "a little longer than that"}\n')
    settings = OfflineSettings(
        engine=EngineConfig(model=pair[0]),
        prompts_file=path,
        batch_sizes=(2,),
        new_tokens=12,
        against_transformers=True,
        repeats=1,
    )
    found = run_offline(settings)
    assert found.ok and found.batches[0].checks[0].equal  # padding is masked
    assert found.prompt_tokens[0] < found.prompt_tokens[1]


def test_random_prompts(pair: tuple[str, str]) -> None:
    settings = OfflineSettings(
        engine=EngineConfig(model=pair[0]), random_prompts=True, new_tokens=8, repeats=1
    )
    found = run_offline(settings)
    assert found.prompt_tokens == (128, 128)
    assert found.baseline == "eyas" and found.batches[0].results[0].acceptance is None


def test_simulated_acceptance(pair: tuple[str, str]) -> None:
    target, draft = pair
    engine = EngineConfig(model=target, draft=draft, simulate_acceptance=(3.0,))
    settings = OfflineSettings(
        engine=engine, batch_sizes=(2,), random_prompts=True, new_tokens=128, repeats=1
    )
    found = run_offline(settings)
    (batch,) = found.batches
    acceptance = batch.results[1].acceptance
    assert acceptance is not None and acceptance.is_simulated and acceptance.length is not None
    assert 2.3 < acceptance.length < 3.7
    assert batch.checks == ()  # the output is not the model's
    console = Console(width=120, record=True, file=io.StringIO())
    render(found, console)
    assert "acceptance is simulated, the output is not the model's" in console.export_text()


def test_too_few_new_tokens_to_time(pair: tuple[str, str]) -> None:
    settings = OfflineSettings(engine=EngineConfig(model=pair[0]), new_tokens=2, repeats=1)
    with pytest.raises(EyasError, match="--new-tokens is too low"):
        run_offline(settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": ()}, "--batch must be at least 1"),
        ({"batch_sizes": (2, 0)}, "--batch must be at least 1"),
        ({"repeats": 0}, "--repeats must"),
        ({"threads": 0}, "--threads must"),
        ({"prompt_tokens": 0}, "--prompt-tokens must"),
        ({"new_tokens": 1}, "--new-tokens must be at least 2"),
        ({"batch_sizes": (1, 4), "num_prompts": 6}, "a multiple of every --batch"),
        ({"random_prompts": True, "prompts_file": Path("p")}, "exclude each other"),
        ({"random_prompts": True, "engine": EngineConfig(model="m", draft="d")}, "leave one of"),
        ({"random_prompts": True, "engine": EngineConfig(model="smollm2-135m")}, "--draft none"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], message: str) -> None:
    values = {"engine": EngineConfig(model="m"), **changes}
    with pytest.raises(ConfigError, match=message):
        OfflineSettings(**values)


def test_without_draft_leaves_no_draft_setting() -> None:
    config = EngineConfig(
        model="m",
        draft="d",
        dtype="float32",
        draft_dtype="bfloat16",
        num_speculative_tokens=4,
        topk=2,
        num_tree_nodes=9,
        draft_boundaries=(1, 2, 3),
        draft_norm_output=True,
        simulate_acceptance=(2.0,),
    )
    assert without_draft(config) == EngineConfig(model="m", dtype="float32")
