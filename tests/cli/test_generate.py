"""`eyas generate` and `eyas demo`."""

import re
import subprocess
import sys
from pathlib import Path

from fixtures.command_line import run

from eyas.bench.timing import Rates
from eyas.cli.generate import describe_speed


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
