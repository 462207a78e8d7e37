"""What the server costs: tokens a second of streams over HTTP, by those of the offline engine.

One run, the same random model of two layers, prompts and settings; both take turns. The engine
has one thread in both cases. Exit code 1 below the goal.

    python scripts/bench_server_overhead.py [--streams 16] [--tokens 128] [--repeats 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from random_model import write_random_model  # noqa: E402
from server_under_test import running_server  # noqa: E402

GOAL = 0.85


async def stream(port: int, prompt: list[int], num_tokens: int) -> int:
    """Read one stream to its end, as plainly as it can be read; its completion_tokens."""
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    tail = b""
    while b"data: [DONE]" not in tail:
        data = await reader.read(1 << 16)
        if not data:
            raise SystemExit(f"a stream ended early: {tail!r}")
        tail = (tail + data)[-2000:]
    writer.close()
    usage = tail.rsplit(b'"completion_tokens":', 1)[1]
    return int(usage.split(b",", 1)[0])


async def serve_once(port: int, prompts: list[list[int]], num_tokens: int) -> float:
    """Tokens a second of all streams at once, from the first request to the last end."""
    started = time.perf_counter()
    counts = await asyncio.gather(*(stream(port, prompt, num_tokens) for prompt in prompts))
    return sum(counts) / (time.perf_counter() - started)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()

    from eyas.engine.llm import LLM
    from eyas.types import SamplingParams

    prompts = [[100 + i, 7, 9, 11] for i in range(arguments.streams)]
    params = SamplingParams(max_tokens=arguments.tokens, temperature=0, ignore_eos=True)
    settings = {"max_model_len": 512, "max_batch_size": arguments.streams}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    offline, served = [], []
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder))
        llm = LLM(str(model), **settings)
        with running_server(model, *flags) as (url, _):
            port = int(url.rsplit(":", 1)[1])
            for _ in range(arguments.repeats):
                started = time.perf_counter()
                outputs = llm.generate(prompts, params)
                num_tokens = sum(len(output.token_ids) for output in outputs)
                offline.append(num_tokens / (time.perf_counter() - started))
                served.append(asyncio.run(serve_once(port, prompts, arguments.tokens)))
    # Of each turn, for what else runs on a shared machine changes from one to the next.
    ratios = [one / other for one, other in zip(served, offline, strict=True)]
    ratio = statistics.median(ratios)
    print(f"offline {[round(v) for v in offline]} tokens/s, served {[round(v) for v in served]}")
    print(f"served by offline {[round(r, 2) for r in ratios]}: {ratio:.2f} (goal {GOAL})")
    return 0 if ratio >= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
