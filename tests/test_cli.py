"""The command line: its surface, its exit codes, and what it says."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import typer
from fixtures.tiny_pair import write_pair
from rich.console import Console
from typer.testing import CliRunner

from eyas.bench.timing import Rates
from eyas.cli import app
from eyas.cli.flags import SAMPLING_HELP, flag_parameters
from eyas.cli.generate import describe_speed
from eyas.cli.progress import ProgressBars
from eyas.config import EngineConfig
from eyas.types import CheckError, EyasError, Finding, SamplingParams, Severity

CACHING = "--prefix-caching/--no-prefix-caching"
ENGINE = (
    "model --draft --device --dtype --num-speculative-tokens --topk --num-tree-nodes "
    f"--max-batch-size --max-model-len --page-size --kv-cache-tokens {CACHING} "
    "--prefill-chunk-tokens --simulate-acceptance --run-ahead --draft-boundaries "
    "--draft-norm-output/--no-draft-norm-output"
)
SAMPLING = (
    "--max-tokens --min-tokens --temperature --top-k --top-p --min-p --presence-penalty "
    "--frequency-penalty --repetition-penalty --seed --stop-token-ids --stop --ignore-eos"
)
# A change of the command line is a change for everyone who has scripts: make it here on purpose.
SURFACE = {
    "demo": "--prompt --max-tokens --draft",
    "generate": f"{ENGINE} {SAMPLING} --prompt --chat/--no-chat",
    "serve": f"{ENGINE} --host --port --served-model-name",
    "check": f"{ENGINE} --json",
    "audit": "path --engine --class --json --baseline",
    "bench offline": ENGINE.replace("--max-batch-size ", "").replace(f"{CACHING} ", "")
    + " --batch --prompt-tokens --new-tokens --prompts --random-prompts --num-prompts --against "
    "--repeats --threads --json",
}


@dataclasses.dataclass
class Ran:
    """What a command left: exit code and both outputs, without line breaks in the error."""

    code: int
    out: str
    err: str


def run(*arguments: object) -> Ran:
    result = CliRunner().invoke(app, [str(a) for a in arguments], prog_name="eyas")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Ran(result.exit_code, result.stdout, " ".join(result.stderr.split()))


def surface(command: Any, name: str = "") -> dict[str, set[str]]:
    """Arguments and flags by command, help options left out."""
    if hasattr(command, "commands"):
        found: dict[str, set[str]] = {}
        for child_name, child in command.commands.items():
            found |= surface(child, f"{name} {child_name}".strip())
        return found
    names = set()
    for parameter in command.params:
        is_flag = parameter.param_type_name == "option"
        flags = [*parameter.opts, *parameter.secondary_opts]
        if "--help" not in flags:
            names.add("/".join(flags) if is_flag else parameter.name)
    return {name: names}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


def test_the_surface_is_this_one() -> None:
    expected = {name: set(flags.split()) for name, flags in SURFACE.items()}
    assert surface(typer.main.get_command(app)) == expected


def test_help_reads_no_torch() -> None:
    code = (
        "import sys; from eyas.cli import app\n"
        "try: app(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'transformers', 'fastapi'} & {*sys.modules}, file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.strip() == "set()"
    assert "--num-speculative-tokens" in ran.stdout  # not cut short on 80 columns


@pytest.mark.parametrize("command", [[sys.executable, "-m", "eyas"], ["eyas"]])
def test_both_ways_to_start(command: list[str]) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ran = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, check=True, env=environment
    )
    assert re.fullmatch(r"eyas \d+\.\d+\.\d+\S*\n", ran.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("sarve x", "No such command 'sarve'. Did you mean 'serve'? `eyas --help`"),
        ("serve", "Missing argument 'MODEL'. `eyas serve --help` lists what it takes."),
        ("serve x --max-batch-siz 3", "no option --max-batch-siz; did you mean --max-batch-size?"),
        ("serve x --page-size 0", "--page-size must be at least 1"),
        ("serve x --page-size many", "Invalid value for '--page-size'"),
        ("serve x --device gpu", "'gpu' is not one of 'auto', 'cpu', 'cuda'."),
        ("serve x --topk 3", "--topk needs a draft: add --draft, or leave --topk out"),
        ("serve x --run-ahead 2", "--run-ahead must be 0 or 1, not 2"),
        ("serve x --draft y --draft-boundaries 2,a", "write it like --draft-boundaries 2,15,27"),
        ("serve x --port 70000", "Invalid value for '--port'"),
        ("serve x y", "unexpected extra argument"),
        ("generate x", "Missing option '--prompt'"),
        ("generate x --prompt hi --top-p 2", "top_p must be between 0 and 1, not 2.0"),
        ("generate x --prompt hi --max-tokens 0", "max_tokens must be at least 1"),
        ("audit . --engine tgi", "'tgi' is not one of 'sglang', 'vllm'."),
        ("bench offline x --batch 1,", "write it like --batch 2,15,27"),
        ("bench offline x --batch 0", "--batch must be at least 1"),
        ("bench offline x --random-prompts --prompts p", "exclude each other"),
        ("bench offline x --against tgi", "'tgi' is not"),
    ],
)
def test_mistakes_exit_with_1_and_say_what_to_write(arguments: str, message: str) -> None:
    ran = run(*arguments.split())
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.lower().startswith("error: ") and message.lower() in ran.err.lower()
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_nothing_to_do_shows_the_help(arguments: list[str]) -> None:
    ran = run(*arguments)
    assert ran.code == 1
    assert "Commands:" in ran.err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (EyasError("mend this"), 1, "error: mend this"),
        (KeyboardInterrupt(), 130, ""),
        (
            CheckError(
                [
                    Finding(Severity.ERROR, "model-length", "settings", "too long", "cut it"),
                    Finding(Severity.WARNING, "tokenizer-missing", "target", "none"),
                    Finding(Severity.ERROR, "memory", "device", "too small"),
                ]
            ),
            2,
            "the check found 2 errors: [settings] model-length: too long → cut it "
            "[device] memory: too small",
        ),
    ],
)
def test_what_a_command_raises_becomes_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr("eyas.cli.generate.load", fail)
    ran = run("demo")
    assert (ran.code, ran.err) == (code, message)


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("eyas.cli.generate.load", fail)
    result = CliRunner().invoke(app, ["demo"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_flags_arrive_as_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []

    def serve(config: EngineConfig, **settings: object) -> int:
        served.append((config, settings))
        return 3

    module = types.ModuleType("eyas.server.launch")
    module.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "eyas.server.launch", module)
    monkeypatch.setattr("eyas.server.launch", module, raising=False)
    ran = run(
        *"serve big --draft small --draft-boundaries 2,15,27 --no-draft-norm-output --topk 2 "
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
    assert served == [(config, {"host": "0.0.0.0", "port": 81, "served_model_name": "name"})]
    run("serve", "big")
    assert served[1] == (
        EngineConfig(model="big"),
        {"host": "127.0.0.1", "port": 8000, "served_model_name": None},
    )


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


def test_engines_of_the_audit_are_those_that_it_reads() -> None:
    from eyas.audit import ENGINES

    choices = ", ".join(repr(engine) for engine in ENGINES)
    assert f"'none' is not one of {choices}." in run("audit", ".", "--engine", "none").err


def test_audit(tmp_path: Path) -> None:
    ran = run("audit", tmp_path / "nowhere", "--engine", "sglang")
    assert ran.code == 1 and "nowhere" in ran.err


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


def test_generate_one_prompt(pair: tuple[Path, Path]) -> None:
    plain = run("generate", pair[0], "--prompt", "the end", "--max-tokens", 9, "--ignore-eos")
    draft = run(
        *("generate", pair[0], "--draft", pair[1], "--prompt", "the end", "--max-tokens", 9),
        "--ignore-eos",
    )
    assert plain.code == draft.code == 0
    assert plain.out == draft.out and len(plain.out) > 1
    assert re.search(r"9 tokens, [\d.]+ tok/s, first token after [\d.]+ s$", plain.err)
    assert re.search(r"[\d.]+ tokens per target forward$", draft.err)


def test_generate_a_batch_says_what_each_would_say_alone(pair: tuple[Path, Path]) -> None:
    settings = ("--max-tokens", 8, "--ignore-eos", "--temperature", 0.8, "--seed", 3)
    both = run("generate", pair[0], "--prompt", "one", "--prompt", "two", *settings)
    assert both.code == 0
    for prompt in ("one", "two"):
        alone = run("generate", pair[0], "--prompt", prompt, *settings)
        assert f"> {prompt}\n{alone.out}" in both.out
    assert both.err.count("8 tokens, finished by length") == 2


def test_generate_until_a_stop_text(pair: tuple[Path, Path]) -> None:
    settings = ("generate", pair[0], "--prompt", "hi", "--max-tokens", 20, "--ignore-eos")
    whole = run(*settings).out.rstrip("\n")
    stop = whole[len(whole) // 2 :][:2]
    ran = run(*settings, "--stop", "not in it", "--stop", stop)
    assert ran.out == whole[: whole.index(stop)] + "\n"


def test_generate_with_and_without_the_template(pair: tuple[Path, Path]) -> None:
    settings = ("--prompt", "hi", "--max-tokens", 6, "--ignore-eos")
    default, chat, text = (
        run("generate", pair[0], *settings, *more).out for more in ([], ["--chat"], ["--no-chat"])
    )
    assert default == chat != text


def test_bench_writes_its_json(pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    settings = ("--new-tokens", 8, "--prompt-tokens", 32, "--repeats", 1, "--batch", "1,2")
    ran = run("bench", "offline", pair[0], *settings, "--json", path)
    assert ran.code == 0, ran.err
    assert "batch 2" in ran.out
    assert [batch["batch_size"] for batch in json.loads(path.read_text())["batches"]] == [1, 2]
    ran = run("bench", "offline", pair[0], *settings, "--json", tmp_path / "no" / "folder")
    assert ran.code == 1 and "cannot be written" in ran.err


def test_demo_in_a_process_of_its_own(smollm2_dir: Path) -> None:
    command = [sys.executable, "-m", "eyas", "demo", "--max-tokens", "12", "--prompt", "Say hello."]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.split()) > 2
    assert "tok/s, first token after" in ran.stderr
    assert "Next: `eyas serve smollm2-135m`" in ran.stderr


def test_speed_is_told_as_far_as_it_is_known() -> None:
    known = Rates(12, 3.0, 1.0, 10, 2.0)
    assert describe_speed(known, (4, 10), True) == (
        "12 tokens, 5.0 tok/s, first token after 1.00 s, 2.50 tokens per target forward"
    )
    unknown = Rates(2, 1.0, 1.0, 0, 0.0)
    assert describe_speed(unknown, (0, 0), True) == "2 tokens, first token after 1.00 s"


def test_progress_without_a_terminal_is_a_line_a_step() -> None:
    console = Console(record=True, width=100, force_terminal=False)
    with ProgressBars(console) as bars:
        for done in (0, 2**20, 2**21, 2**21):
            bars("loading target", done, 2**21)
        bars.counter("running")(1, 2)
    text = console.export_text()
    assert re.fullmatch(r"loading target: 2 MiB in \d+\.\d s\n", text)


def test_progress_on_a_terminal_is_a_bar() -> None:
    console = Console(record=True, width=100, force_terminal=True)
    with ProgressBars(console) as bars:
        bars("loading target", 2**20, 2**21)
        bars.counter("running")(1, 2)
    text = console.export_text()
    assert "1.0/2.0 MiB" in text and "1/2" in text
