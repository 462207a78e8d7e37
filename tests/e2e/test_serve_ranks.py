"""`eyas serve --tp 2` as a process: it answers, and ends with one report when a rank is killed."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fixtures.byte_tokenizers import write_byte_level
from fixtures.checkpoints import DraftShape, TargetShape, write_draft, write_target
from fixtures.server_process import Process

from eyas import LLM, SamplingParams

FLAGS = "--device cpu --max-model-len 512 --max-batch-size 2 --no-acceptance-probe".split()
VOCAB = 260


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    write_target(folder / "target", TargetShape(num_layers=4, vocab_size=VOCAB))
    write_byte_level(folder / "target")
    write_draft(folder / "draft", DraftShape(vocab_size=VOCAB))
    return folder


@contextlib.contextmanager
def served(pair: Path, log: Path) -> Iterator[tuple[Process, int]]:
    """A server that is ready, and the process of its second rank."""
    flags = ["--draft", str(pair / "draft"), "--draft-boundaries", "1,2,4", "--tp", "2", *FLAGS]
    process = Process(pair / "target", log, *flags)
    try:
        process.wait_for(status="ready")
        engine = process.engine_pid()
        threads = Path(f"/proc/{engine}/task").iterdir()
        children = [int(c) for t in threads for c in (t / "children").read_text().split()]
        (rank,) = [
            c for c in children if b"rank_process" in Path(f"/proc/{c}/cmdline").read_bytes()
        ]
        yield process, rank
    finally:
        process.process.kill()


def is_gone(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


def test_a_killed_rank_ends_the_server_with_one_report(pair: Path, tmp_path: Path) -> None:
    prompt = list(b"hawks and owls")
    with served(pair, tmp_path / "log") as (process, rank):
        asked = {"prompt": prompt, "max_tokens": 12, "seed": 3, "ignore_eos": True}
        answer = httpx.post(f"{process.url}/v1/completions", json=asked, timeout=60).json()
        stream = asked | {"max_tokens": 480, "stream": True}
        with httpx.stream("POST", f"{process.url}/v1/completions", json=stream, timeout=60) as sse:
            lines = (line.removeprefix("data: ") for line in sse.iter_lines() if line)
            next(lines)
            os.kill(rank, signal.SIGKILL)
            start = time.monotonic()
            last = json.loads(list(lines)[-1])
        assert last["error"]["code"] == "engine_dead"
        assert "rank 1" in last["error"]["message"] and "SIGKILL" in last["error"]["message"]
        assert process.process.wait(30) == 1
        seconds = time.monotonic() - start
        assert is_gone(rank)
    log = (tmp_path / "log").read_text()
    assert log.count(f"the engine died: rank 1 (process {rank} on ") == 1
    assert "failed while serving: killed by SIGKILL" in log
    assert seconds < 5, log
    alone = LLM(str(pair / "target"), device="cpu", max_model_len=512, max_batch_size=2)
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    assert alone.generate(prompt, params)[0].text == answer["choices"][0]["text"]


def test_a_signal_ends_all_ranks(pair: Path, tmp_path: Path) -> None:
    with served(pair, tmp_path / "log") as (process, rank):
        assert process.stop() == 0
        deadline = time.monotonic() + 5
        while not is_gone(rank) and time.monotonic() < deadline:
            threading.Event().wait(0.05)
        assert is_gone(rank)
