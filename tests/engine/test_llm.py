"""What `LLM` refuses before it reads anything, with what to write instead."""

from pathlib import Path
from typing import Any

import pytest
from fixtures.tiny_pair import write_pair

from eyas.config import ConfigError
from eyas.engine.llm import LLM
from eyas.types import EyasError


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"device": "tpu"}, "device must be one of 'auto', 'cpu', 'cuda', not 'tpu'"),
        ({"dtype": "float8"}, "dtype must be one of"),
        ({"max_batch_size": "4"}, "max_batch_size must be an integer, not '4'"),
        ({"max_batch_size": True}, "max_batch_size must be an integer, not True"),
        ({"max_model_len": 5.0}, "max_model_len must be an integer or None, not 5.0"),
        ({"prefix_caching": "no"}, "prefix_caching must be True or False, not 'no'"),
        ({"draft_boundaries": 3}, "draft_boundaries must be a tuple, each item an integer"),
        ({"draft": 5}, "draft must be a string or None, not 5"),
        ({"batch_size": 4}, "unknown setting 'batch_size'; did you mean max_batch_size?"),
    ],
)
def test_settings_of_the_wrong_kind(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LLM("no-such-model", **settings)


def test_a_model_that_is_no_name() -> None:
    with pytest.raises(ConfigError, match="model must be a string, not 5"):
        LLM(5)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    target, _ = write_pair(tmp_path_factory.mktemp("pair"))
    return LLM(Path(target), max_model_len=64, device="cpu")


@pytest.mark.parametrize("prompts", [5, [1.5], ["a", 1], [["a"]], None, {"prompt": "a"}, b"a"])
def test_prompts_of_no_known_form(llm: LLM, prompts: Any) -> None:
    with pytest.raises(EyasError, match="prompts must be a text, a list of token ids, or a list"):
        llm.generate(prompts)


@pytest.mark.parametrize("params", [{"max_tokens": 1}, 5, [None]])
def test_params_of_no_known_form(llm: LLM, params: Any) -> None:
    with pytest.raises(EyasError, match="params must be SamplingParams"):
        llm.generate(["a"], params)


def test_nothing_is_asked_of_no_prompts(llm: LLM) -> None:
    assert llm.generate([]) == []
