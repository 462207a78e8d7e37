"""The engine in its process: the same answers, and one report however it ends."""

import asyncio
import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fixtures.byte_tokenizers import write_byte_level
from fixtures.served_engine import VOCAB, load_in_process
from fixtures.tiny import llama_config, make_engine, random_prompts, run, tiny_target

from eyas.engine.async_engine import EngineDeadError, RequestStream
from eyas.engine.engine_process import EngineProcess, LoadError
from eyas.types import EyasError, SamplingParams

GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
ENDLESS = SamplingParams(max_tokens=300, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("tokenizer"))


def make(folder: Path, how: str = "") -> EngineProcess:
    return EngineProcess(functools.partial(load_in_process, folder, how))


def nothing(step: str, done: int, total: int) -> None:
    """No progress is looked at."""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def body() -> None:
        await asyncio.wait_for(test(), 90)

    asyncio.run(body())


async def tokens_of(stream: RequestStream) -> list[int]:
    return [token async for output in stream for token in output.new_token_ids]


def test_forwarded_log_lines_are_plain() -> None:
    """Not with a level and a name before them, which the parent adds in its own format."""
    code = (
        "import logging; from eyas.engine.engine_process import ForwardLogs\n"
        "class Port:\n    def send(self, event): print(event.logger, event.level, event.text)\n"
        "logging.basicConfig(level=20, handlers=[ForwardLogs(Port())], force=True)\n"
        "logging.getLogger('a.b').info('read %d', 3)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "a.b 20 read 3\n"


def test_it_serves_what_the_engine_says_and_leaves_no_process(folder: Path) -> None:
    prompts = random_prompts([3, 20, 40], vocab_size=VOCAB)
    local = make_engine(tiny_target(llama_config(vocab_size=VOCAB)))
    expected = [result.tokens for result in run(local, prompts, [GREEDY] * 3)]
    steps: list[tuple[str, int, int]] = []

    async def test() -> None:
        engine = make(folder)
        try:
            loaded = await engine.load(lambda *step: steps.append(step))
            assert (loaded.folder, engine.info.vocab_size) == (folder, VOCAB)
            pid = engine.pid
            assert pid is not None
            # As a terminal does, to the whole group: only the parent answers.
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid, number)
            streams = await asyncio.gather(
                *(engine.submit(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts))
            )
            assert await asyncio.gather(*map(tokens_of, streams)) == expected
            with pytest.raises(EyasError, match="the prompt has 320 tokens"):
                await engine.submit("long", [1] * 320, GREEDY)
            left = await engine.submit("left", [1] * 10, ENDLESS)
            await anext(left)
            assert engine.status().num_running == 1
            left.close()
            while (s := engine.status()).num_running or s.num_free_pages != s.num_pages:
                await asyncio.sleep(0.01)
            again = await engine.submit("again", [1], ENDLESS)
            assert engine.counters.num_round_tokens >= 3 * 19
        finally:
            await engine.stop()
        with pytest.raises(EngineDeadError, match="shutting down"):
            while True:
                await anext(again)
        assert not is_alive(pid)
        await engine.stop()

    in_loop(test)
    assert steps == [("loading target", 5, 10), ("loading target", 10, 10)]


def test_a_killed_engine_is_reported_once_to_everyone(folder: Path) -> None:
    async def test() -> None:
        engine = make(folder)
        try:
            await engine.load(nothing)
            streams = [await engine.submit(str(i), [1], ENDLESS) for i in range(2)]
            await anext(streams[0])
            os.kill(engine.pid or 0, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineDeadError, match="killed by SIGKILL .*memory"):
                    while True:
                        await anext(stream)
            assert "SIGKILL" in await engine.died()
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await engine.submit("late", [1], GREEDY)
        finally:
            await engine.stop()

    in_loop(test)


def test_an_exception_in_a_step_comes_with_its_traceback(folder: Path) -> None:
    async def test() -> None:
        engine = make(folder, "dies")
        try:
            await engine.load(nothing)
            stream = await engine.submit("a", [1], ENDLESS)
            with pytest.raises(EngineDeadError, match="RuntimeError: rank 0 fell over"):
                while True:
                    await anext(stream)
            assert await engine.died() == "RuntimeError: rank 0 fell over"
            assert "in dying" in engine.death_details
        finally:
            await engine.stop()
        assert engine.error == "RuntimeError: rank 0 fell over"

    in_loop(test)


def test_loads_that_fail(folder: Path) -> None:
    async def failed(how: str) -> Exception:
        engine = make(folder, how)
        try:
            with pytest.raises((EyasError, LoadError)) as caught:
                await engine.load(nothing)
        finally:
            await engine.stop()
        return caught.value

    async def test() -> None:
        mistake, crash, ended = await asyncio.gather(*map(failed, ("mistake", "crash", "exit")))
        assert type(mistake) is EyasError and str(mistake) == "no such model"
        assert isinstance(crash, LoadError) and str(crash) == "ZeroDivisionError: in the load"
        assert "load_in_process" in crash.details
        assert isinstance(ended, LoadError)
        assert str(ended) == "the engine process ended with exit code 7"

    in_loop(test)


def test_a_load_can_be_stopped(folder: Path) -> None:
    async def test() -> None:
        engine, begun = make(folder, "hang"), asyncio.Event()
        loading = asyncio.ensure_future(engine.load(lambda *_: begun.set()))
        await begun.wait()
        loading.cancel()
        await engine.stop()
        assert not is_alive(engine.pid or 0)
        assert not engine._died.is_set()

    in_loop(test)


def test_a_load_can_be_stopped_at_once(folder: Path) -> None:
    async def test() -> None:
        engine = make(folder)
        await engine.stop()  # before its load: nothing to do
        loading = asyncio.ensure_future(engine.load(nothing))
        await asyncio.sleep(0)
        loading.cancel()
        await engine.stop()
        assert not is_alive(engine.pid or 0)

    in_loop(test)


def test_an_engine_does_not_outlive_its_parent(folder: Path) -> None:
    script = f"""
        import asyncio, functools, os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from fixtures.served_engine import load_in_process
        from pathlib import Path
        from eyas.engine.engine_process import EngineProcess

        async def main():
            engine = EngineProcess(functools.partial(load_in_process, Path({str(folder)!r}), ""))
            await engine.load(lambda *_: None)
            print(engine.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        if __name__ == "__main__":
            asyncio.run(main())
    """
    path = folder / "parent.py"
    path.write_text(textwrap.dedent(script))
    done = subprocess.run([sys.executable, str(path)], stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
