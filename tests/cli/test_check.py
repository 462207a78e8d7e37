"""`eyas check` and `eyas audit`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.command_line import run


def test_engines_of_the_audit_are_those_that_it_reads() -> None:
    from eyas.audit import ENGINES

    choices = ", ".join(repr(engine) for engine in ENGINES)
    assert f"'none' is not one of {choices}." in run("audit", ".", "--engine", "none").err


def test_audit(tmp_path: Path) -> None:
    ran = run("audit", tmp_path / "nowhere", "--engine", "sglang")
    assert ran.code == 1 and "nowhere" in ran.err


def test_audit_passes_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, dict[str, object]]] = []

    def run_audit(path: Path, **settings: object) -> int:
        asked.append((path, settings))
        return 2

    monkeypatch.setattr("eyas.audit.run_audit", run_audit)
    ran = run(*"audit src --engine vllm --class Llama --json --baseline known.json".split())
    assert ran.code == 2
    settings = {"engine": "vllm", "class_name": "Llama", "as_json": True}
    assert asked == [(Path("src"), settings | {"baseline": Path("known.json")})]


def test_check_of_a_pair_that_fits(pair: tuple[Path, Path]) -> None:
    ran = run("check", pair[0], "--draft", pair[1])
    assert ran.code == 0
    assert "target and draft fit: 0 errors" in ran.out


def test_check_as_json(pair: tuple[Path, Path]) -> None:
    ran = run("check", pair[0], "--draft", pair[1], "--json", "--max-model-len", 4096)
    report = json.loads(ran.out)
    assert (ran.code, report["ok"]) == (2, False)
    assert [finding["code"] for finding in report["findings"]] == ["model-length"]


def test_check_names_everything_at_once(pair: tuple[Path, Path], tmp_path: Path) -> None:
    ran = run("check", pair[0], "--draft", tmp_path / "none", "--max-model-len", 4096, "--json")
    found = {finding["code"]: finding for finding in json.loads(ran.out)["findings"]}
    assert ran.code == 2
    assert {"draft-not-found", "model-length"} <= set(found)
    assert "does not exist" in found["draft-not-found"]["message"]


def test_check_of_two_missing_folders(tmp_path: Path) -> None:
    ran = run("check", tmp_path / "a", "--draft", tmp_path / "b", "--json")
    codes = [finding["code"] for finding in json.loads(ran.out)["findings"]]
    assert codes[:2] == ["target-not-found", "draft-not-found"]
    assert len(codes) == len(set(codes))


def test_check_of_a_folder_never_asks_the_network(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    def refuse(*arguments: object, **settings: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert run("check", pair[0], "--draft", pair[1]).code == 0


def test_check_is_quick(pair: tuple[Path, Path]) -> None:
    code = (
        "import sys, time; from eyas.cli import app\n"
        f"try: app(['check', {str(pair[0])!r}, '--draft', {str(pair[1])!r}])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print('transformers' in sys.modules, time.process_time(), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    has_transformers, seconds = ran.stderr.split()
    assert has_transformers == "False"
    # The promise is 5 s on an idle machine; CPU time grows on a crowded one.
    assert float(seconds) < 10


def test_check_leaves_the_weights_of_a_hub_repository_where_they_are(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    def resolve(name: str, *, weights: bool, progress: object) -> Path:
        asked.append((name, weights))
        return pair[1] if name == "some/draft" else pair[0]

    monkeypatch.setattr("eyas.cli.check.resolve_model", resolve)
    assert run("check", "some/target", "--draft", "some/draft").code == 0
    assert asked == [("some/target", False), ("some/draft", False)]


def test_explain_prints_the_plan(smollm2_dir: Path) -> None:
    ran = run("check", smollm2_dir, "--explain", "--max-model-len", "256")
    assert ran.code == 0
    for section in ("shapes", "weights", "KV cache", "memory", "backends"):
        assert f"\n{section}  " in ran.out
    refused = run("check", smollm2_dir, "--explain", "--json")
    assert refused.code == 1 and "leave --explain out" in refused.err


@pytest.mark.parametrize("size", ["0", "inf", "nan", "1e300", "96GiB"])
def test_memory_that_no_device_has(pair: tuple[Path, Path], size: str) -> None:
    ran = run("check", pair[0], "--device-memory", size)
    assert (ran.code, "--device-memory" in ran.err) == (1, True)
