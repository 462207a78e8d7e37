"""Flags are the settings."""

import dataclasses
import sys
import types
from typing import Any

import pytest
from fixtures.command_line import run

from eyas.cli.flags import SAMPLING_HELP, flag_parameters
from eyas.config import EngineConfig
from eyas.types import SamplingParams


def test_flags_arrive_as_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []

    def serve(config: EngineConfig, settings: dict[str, object]) -> int:
        served.append((config, settings))
        return 3

    module = types.ModuleType("eyas.server.launch")
    module.serve = serve  # type: ignore[attr-defined]
    module.ServerSettings = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "eyas.server.launch", module)
    monkeypatch.setattr("eyas.server.launch", module, raising=False)
    refused = run(*"serve big --draft small --simulate-acceptance 2.5".split())
    assert refused.code == 1 and "--allow-simulated-acceptance" in refused.err and not served
    ran = run(
        *"serve big --allow-simulated-acceptance --draft small --draft-boundaries 2,15,27 "
        "--no-draft-norm-output --topk 2 "
        "--dtype float16 --kv-cache-tokens 4096 --no-prefix-caching --simulate-acceptance 2.5 "
        "--host 0.0.0.0 --port 81 --served-model-name name".split()
    )
    assert ran.code == 3
    config = EngineConfig(
        model="big",
        draft="small",
        draft_boundaries=(2, 15, 27),
        draft_norm_output=False,
        topk=2,
        dtype="float16",
        kv_cache_tokens=4096,
        prefix_caching=False,
        simulate_acceptance=(2.5,),
    )
    ((seen, settings),) = served
    assert seen == config
    assert (settings["host"], settings["port"]) == ("0.0.0.0", 81)
    assert settings["served_model_name"] == "name"
    run("serve", "big")
    seen, settings = served[1]
    assert seen == EngineConfig(model="big")
    assert (settings["host"], settings["port"]) == ("127.0.0.1", 8000)
    assert settings["served_model_name"] is None


def test_every_setting_has_a_flag_and_a_text() -> None:
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    texts = {field.name: field.metadata["help"] for field in dataclasses.fields(EngineConfig)}
    assert set(flag_parameters(EngineConfig, texts)) == names
    assert all(text[0].isupper() and text.endswith(".") for text in texts.values())
    assert set(SAMPLING_HELP) <= {field.name for field in dataclasses.fields(SamplingParams)}


def test_a_setting_of_an_unknown_kind_is_noticed() -> None:
    @dataclasses.dataclass
    class Odd:
        sizes: dict[str, int] | None = None

    with pytest.raises(AssertionError, match="no flag for sizes"):
        flag_parameters(Odd, {"sizes": "Sizes."})
