"""The command line: its surface, its exit codes, and what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from fixtures.command_line import run
from typer.testing import CliRunner

from eyas.cli import app
from eyas.types import CheckError, EyasError, Finding, Severity

CACHING = "--prefix-caching/--no-prefix-caching"
ENGINE = (
    "model --draft --device --dtype --draft-dtype --tensor-parallel-size/--tp --expert-parallel "
    "--watchdog --num-speculative-tokens --topk --num-tree-nodes "
    f"--max-batch-size --max-model-len --page-size --kv-cache-tokens {CACHING} "
    "--prefill-chunk-tokens --images/--no-images --cuda-graphs/--no-cuda-graphs "
    "--attention-backend "
    "--simulate-acceptance --run-ahead "
    "--draft-boundaries --draft-norm-output/--no-draft-norm-output"
)
PROBE = "--acceptance-probe/--no-acceptance-probe"
SAMPLING = (
    "--max-tokens --min-tokens --temperature --top-k --top-p --min-p --presence-penalty "
    "--frequency-penalty --repetition-penalty --seed --stop-token-ids --stop --ignore-eos"
)
# A change of the command line is a change for everyone who has scripts: make it here on purpose.
SURFACE = {
    "demo": "--prompt --max-tokens --draft",
    "generate": f"{ENGINE} {PROBE} {SAMPLING} --prompt --chat/--no-chat",
    "serve": f"{ENGINE} {PROBE} --host --port --served-model-name --api-key --log-format "
    "--drain-seconds --allow-simulated-acceptance --max-images --max-image-bytes "
    "--max-image-pixels --allow-local-images",
    "train": "target --out --prompts --eval-prompts --stage --num-prompts --self-prompts "
    "--num-validation --max-prompt-tokens --max-new-tokens --greedy-share --min-temperature "
    "--max-temperature --shard-size --draft-vocab-size --draft-intermediate-size "
    "--boundaries --eval-tokens --chain --tree --temperatures --format --device --dtype "
    "--batch-size --template-settings --num-epochs --num-steps --num-draft-steps "
    "--step-decay --require-kept-argmax/--no-require-kept-argmax --learning-rate "
    "--final-learning-rate-ratio --warmup-ratio --clip-norm --tokens-per-step "
    "--tokens-per-batch --max-length --log-every --checkpoint-every --seed",
    "wait": "url --timeout",
    "check": f"{ENGINE} --device-memory --json --explain",
    "audit": "path --engine --class --json --baseline",
    "bench offline": ENGINE.replace("--max-batch-size ", "").replace(f"{CACHING} ", "")
    + f" {PROBE} --batch --prompt-tokens --new-tokens --prompts --random-prompts --num-prompts "
    "--against --repeats --threads --shape --profile/--no-profile --trace --plot --json",
    "bench serving": "target serve_flags --rate --num-requests --max-tokens --temperature "
    "--ignore-eos --prompts --seed --first-token-goal --inter-token-goal --served-model-name "
    "--api-key --plot --json",
}


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
        ("bench offline", "give a MODEL, or --shape"),
        ("bench offline x --shape tiny", "MODEL and --shape exclude each other"),
        ("bench offline --shape huge", "use one of llama-3.1-8b"),
        ("bench offline --shape no/config.json", "cannot be read"),
        ("bench offline --shape tiny --draft y", "--shape makes its own draft"),
        ("bench offline --shape tiny --num-prompts 3", "does not go with --shape"),
        ("bench offline --shape tiny --tp 2", "--shape runs on one device: leave --tp out"),
        ("bench offline --shape tiny --new-tokens 3", "--new-tokens must be at least 16"),
        ("bench offline --shape tiny --no-profile --trace t", "leave --no-profile out"),
        ("bench offline x --trace t", "--trace needs --shape"),
        ("bench offline x --prompt-tokens 9,8", "several --prompt-tokens need --shape"),
        ("bench serving http://127.0.0.1:1 --rate 0", "--rate must be above 0"),
        ("bench serving http://127.0.0.1:1 -- --topk 2", "give a MODEL"),
        ("bench serving http://127.0.0.1:1", "does not answer as a server"),
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
