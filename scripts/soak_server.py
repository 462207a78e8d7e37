"""Keep a server of a random model busy and look for what grows or stays (exit code 1).

Sixteen clients ask for short and long answers, streamed and not, and leave every third one at a
random moment. Afterwards every page and slot must be free, no request stuck, and the memory of the
two processes no more than it was when it had been warm for a while.

    python scripts/soak_server.py [--minutes 10] [--clients 16]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from random_model import write_random_model
from server_under_test import cpu_seconds, resident_mib, running_server

MOST_GROWTH_MIB = 24.0
REQUEST_SECONDS = 120.0  # longer is stuck: of the server's computing, for it may have neighbours
SILENT_SECONDS, SILENT_COMPUTED = 300.0, 5.0  # or so little computed in a time of the clock
WARM_SHARE = 0.3  # of the time, before memory counts


def make_body(rng: random.Random) -> bytes:
    """A request of any kind that the server takes."""
    first = rng.choice((100, 200, 300))  # some prompts share their pages
    body: dict[str, Any] = {
        "prompt": [first] * rng.choice((3, 40, 200)) + [rng.randrange(40_000) for _ in range(3)],
        "max_tokens": rng.choice((1, 4, 16, 64)),
        "stream": rng.random() < 0.6,
        "temperature": rng.choice((0, 1)),
        "n": rng.choice((1, 1, 1, 3)),
        "logprobs": rng.choice((None, None, 2)),
        "stop": rng.choice((None, "the")),
        "frequency_penalty": rng.choice((0, 0.5)),
    }
    return json.dumps(body).encode()


class StuckError(Exception):
    """An answer that does not come."""


async def read_all(reader: asyncio.StreamReader, pid: int, leave_after: float | None) -> bytes:
    """A whole answer. Raises TimeoutError after leave_after seconds, StuckError if none comes."""
    if leave_after is not None:
        return await asyncio.wait_for(reader.read(-1), leave_after)
    reading = asyncio.ensure_future(reader.read(-1))
    started, computed = time.monotonic(), cpu_seconds(pid)
    while not reading.done():
        await asyncio.wait({reading}, timeout=5)
        passed, done = time.monotonic() - started, cpu_seconds(pid) - computed
        is_silent = passed > SILENT_SECONDS and done < SILENT_COMPUTED
        if not reading.done() and (done > REQUEST_SECONDS or is_silent):
            reading.cancel()
            raise StuckError
    return reading.result()


async def request(port: int, pid: int, rng: random.Random) -> str:
    """One request: "ok" or "left"; anything else raises."""
    body = make_body(rng)
    leave_after = rng.uniform(0, 0.5) if rng.random() < 0.33 else None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    try:
        answer = await read_all(reader, pid, leave_after)
    except TimeoutError:
        return "left"
    except StuckError:
        raise SystemExit(f"stuck: {body.decode()}") from None
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    if b" 200 OK" not in answer[:20] or b'"error"' in answer:
        raise SystemExit(f"{body.decode()}\n{answer.decode()}")
    return "ok"


async def soak(url: str, pid: int, *, seconds: float, num_clients: int) -> tuple[float, float]:
    """Memory in MiB once warm, and at the end."""
    port, started = int(url.rsplit(":", 1)[1]), time.monotonic()
    counts = {"ok": 0, "left": 0}
    warm = 0.0

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() - started < seconds:
            outcome = await request(port, pid, rng)
            counts[outcome] += 1

    async def watch() -> None:
        nonlocal warm
        while True:
            await asyncio.sleep(seconds / 10)
            passed = time.monotonic() - started
            memory = resident_mib(pid)
            if not warm and passed > WARM_SHARE * seconds:
                warm = memory
            print(f"{passed:5.0f} s: {counts}, {memory:.0f} MiB", flush=True)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client(number) for number in range(num_clients)))
    watching.cancel()
    return warm, resident_mib(pid)


def get(url: str) -> dict[str, Any]:
    """A JSON answer."""
    with urllib.request.urlopen(url, timeout=30) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def main() -> int:
    """Soak and judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder))
        flags = ("--max-model-len=512", "--max-batch-size=16", "--kv-cache-tokens=6000")
        with running_server(model, *flags) as (url, pid):
            seconds = arguments.minutes * 60
            warm, last = asyncio.run(soak(url, pid, seconds=seconds, num_clients=arguments.clients))
            deadline = time.monotonic() + 5
            while (health := get(f"{url}/health"))["num_running"] and time.monotonic() < deadline:
                time.sleep(0.1)
    print(f"memory {warm:.0f} -> {last:.0f} MiB; {health}")
    free = health["num_free_pages"] == health["num_pages"] and not health["num_waiting"]
    return 0 if free and not health["num_running"] and last - warm < MOST_GROWTH_MIB else 1


if __name__ == "__main__":
    raise SystemExit(main())
