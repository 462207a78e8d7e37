"""Inputs that once broke something: each is answered, or refused with what to change."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import DraftShape, write_draft
from fixtures.sampling_world import ask
from fixtures.tiny import llama_config, make_engine, random_prompts, run, tiny_target
from fixtures.tiny_pair import VOCAB_SIZE, write_pair

from eyas.config import EngineConfig
from eyas.engine.check import run_check
from eyas.engine.check_report import CheckReport
from eyas.engine.llm import LLM
from eyas.engine.tokenizer import Tokenizer
from eyas.models.embedded import ModelResolutionError, resolve_model
from eyas.types import EyasError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [[5, 6, 7], [9, 8]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pair(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    return LLM(str(target), draft=str(draft), device="cpu", max_model_len=64, max_batch_size=4)


def checked(folder: Path, **settings: Any) -> CheckReport:
    names = {"model": str(folder / "target"), "draft": str(folder / "draft"), "device": "cpu"}
    return run_check(EngineConfig(**(names | settings)), budget_bytes=1 << 34)


def error_codes(report: CheckReport) -> list[str]:
    return [finding.code for finding in report.findings if finding.severity == "error"]


def test_two_streams_side_by_side(llm: LLM) -> None:
    """The turn that moves one moves the other too: what it told was lost, and the end with it."""
    want = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    got: list[list[int]] = [[], []]
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(100):
        for stream, tokens in zip(streams, got, strict=True):
            _, output = next(stream, (None, None))
            tokens += () if output is None else output.new_token_ids
    assert got == want
    assert not llm.engine.requests and not llm._told


def test_an_answer_within_a_stream(llm: LLM) -> None:
    want = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    got: list[int] = []
    for _, step in llm.stream(PROMPTS[0], GREEDY):
        got += step.new_token_ids
        assert [o.token_ids for o in llm.generate([PROMPTS[1]], GREEDY)] == want[1:]
    assert got == want[0]


def test_a_stream_that_is_left_keeps_nothing(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    llm.generate([PROMPTS[1]], GREEDY)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.requests and not llm._told


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-37, 1e-39, 1e-44])
@pytest.mark.parametrize("top_k", [0, 5])
def test_the_coldest_temperatures_are_greedy(temperature: float, top_k: int) -> None:
    """Dividing by a subnormal gave infinities, of which the first token was taken."""
    prompts = random_prompts([5, 17])
    engine = make_engine(tiny_target())
    cold = SamplingParams(temperature=temperature, top_k=top_k, seed=1, max_tokens=8)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    want = [answer.tokens for answer in run(engine, prompts, [greedy] * 2)]
    assert [answer.tokens for answer in run(engine, prompts, [cold] * 2)] == want


def test_more_logprobs_than_tokens() -> None:
    """The whole vocabulary is reported; the round failed, and every request with it."""
    engine = make_engine(tiny_target(llama_config(vocab_size=10)))
    params = SamplingParams(temperature=0, logprobs=20, max_tokens=3)
    (answer,) = ask(engine, [[1, 2]], [params])
    assert [len(one.top) for one in answer.logprobs] == [10] * 3


@pytest.mark.parametrize("min_tokens", [61, 2**70])
def test_more_tokens_than_the_model_length_leaves(llm: LLM, min_tokens: int) -> None:
    """It was not kept, or overflowed in the slot."""
    with pytest.raises(EyasError, match="leaves 60"):
        llm.generate([[1, 2, 3, 4]], SamplingParams(min_tokens=min_tokens))


@pytest.mark.parametrize(("topk", "is_refused"), [(2, False), (3, False), (4, True)])
def test_more_candidates_than_the_draft_has_tokens(
    folder: Path, topk: int, is_refused: bool
) -> None:
    write_draft(folder / "small", DraftShape(vocab_size=VOCAB_SIZE, draft_vocab_size=3))
    report = checked(folder, draft=str(folder / "small"), topk=topk)
    assert error_codes(report) == ["topk-above-draft-vocabulary"] * is_refused


@pytest.mark.parametrize(("length", "codes"), [(1, ["model-length"]), (2, [])])
def test_a_length_without_room_for_an_answer(folder: Path, length: int, codes: list[str]) -> None:
    assert error_codes(checked(folder, max_model_len=length)) == codes


def _header(text: bytes) -> Callable[[Path], Any]:
    return lambda file: file.write_bytes(len(text).to_bytes(8, "little") + text)


BROKEN_WEIGHTS: dict[str, Callable[[Path], Any]] = {
    "bottomless header": _header(b"[" * 200_000),
    "metadata is a list": _header(b'{"__metadata__":[1]}'),
    "link to nowhere": lambda file: (file.unlink(), file.symlink_to(file.parent / "gone")),
    "folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("name", BROKEN_WEIGHTS)
def test_weights_that_cannot_be_read(folder: Path, side: str, name: str) -> None:
    BROKEN_WEIGHTS[name](folder / side / "model.safetensors")
    assert "weights-broken" in error_codes(checked(folder))


@pytest.mark.parametrize("side", ["target", "draft"])
def test_a_bottomless_config(folder: Path, side: str) -> None:
    (folder / side / "config.json").write_text('{"a":' + "[" * 200_000)
    assert "config-unreadable" in error_codes(checked(folder))


def test_a_name_too_long_for_a_file() -> None:
    with pytest.raises(ModelResolutionError, match="File name too long"):
        resolve_model("x" * 5000)


def test_a_dtype_that_transformers_trips_over(folder: Path) -> None:
    """It fails with an AttributeError beside the tokenizer; a draft's is read by nobody else."""
    for name, codes in (("draft", set()), ("target", {"config-wrong-value"})):
        path = folder / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"torch_dtype": "torch.float16"}))
        assert set(error_codes(checked(folder))) == codes
    with pytest.raises(EyasError, match="no tokenizer that can be read"):
        Tokenizer(folder / "target")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_config_that_is_not_plain_utf8(folder: Path, encoding: str) -> None:
    """transformers takes neither."""
    path = folder / "target" / "config.json"
    path.write_text(path.read_text(), encoding=encoding)
    assert "config-unreadable" in error_codes(checked(folder))
    with pytest.raises(EyasError, match="no tokenizer that can be read"):
        Tokenizer(folder / "target")


@pytest.mark.parametrize(("count", "codes"), [(32, []), (33, ["end-tokens"])])
def test_more_end_tokens_than_can_be_watched(folder: Path, count: int, codes: list[str]) -> None:
    """Every request would be refused for them."""
    path = folder / "target" / "config.json"
    ids = [*range(count), VOCAB_SIZE + 5]  # the last one can never come
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ids}))
    assert error_codes(checked(folder)) == codes
    if not codes:
        llm = LLM(folder / "target", device="cpu", max_model_len=64)
        assert llm.generate("a", GREEDY)[0].error is None


def test_a_broken_tokenizer_is_found_before_the_load(folder: Path) -> None:
    (folder / "target" / "tokenizer.json").write_text("{}")
    steps: list[str] = []
    with pytest.raises(EyasError, match="no tokenizer that can be read"):
        LLM(folder / "target", device="cpu", progress=lambda step, done, total: steps.append(step))
    assert not steps
