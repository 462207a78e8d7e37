"""Speed of a server over HTTP under open-loop arrivals: requests come when they come (a Poisson
process), however far behind the server is."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from eyas.bench.http_client import RequestRecord, stream_chat
from eyas.bench.prompts import BUILT_IN, Messages, read_messages
from eyas.bench.serving_results import Goals, RateResult, ServingResult, summarise
from eyas.config import ConfigError
from eyas.types import EyasError

_NUM_WARM_UP = 2
_CONNECT_SECONDS = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """What to send. Raises ConfigError on values that cannot be.

    rates: requests a second, one run each; num_requests: of each run. prompts_file: JSONL, whose
    prompts are taken in turns; None takes the built-in ones, no two of them alike. model: None asks
    the server. seed: of the arrivals and of the answers.
    """

    rates: tuple[float, ...] = (1.0,)
    num_requests: int = 64
    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    prompts_file: Path | None = None
    seed: int = 0
    goals: Goals = Goals(first_token=1.0, inter_token=0.1)
    model: str | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        if not self.rates or min(self.rates) <= 0:
            raise ConfigError("--rate must be above 0")
        for name in ("num_requests", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
        if self.temperature < 0:
            raise ConfigError("--temperature must be at least 0")
        if min(self.goals.first_token, self.goals.inter_token) <= 0:
            raise ConfigError("--first-token-goal and --inter-token-goal must be above 0")

    def conversations(self, run: int) -> list[Messages]:
        """One for each request of a run (0 and up); built-in ones are new in each. Raises EyasError
        for a file that holds none."""
        if self.prompts_file is None:
            first = run * self.num_requests
            return [_built_in(number) for number in range(first, first + self.num_requests)]
        found = read_messages(self.prompts_file)
        if not found:
            raise EyasError(f"--prompts {self.prompts_file} holds no prompts")
        return list(itertools.islice(itertools.cycle(found), self.num_requests))

    def body(self, model: str, messages: Messages, number: int) -> dict[str, Any]:
        """A request."""
        body: dict[str, Any] = {
            "model": model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed + number,
        }
        return body | ({"ignore_eos": True} if self.ignore_eos else {})


def run_serving(
    url: str,
    settings: ServingSettings,
    *,
    on_request: Callable[[int, int], None] | None = None,
) -> ServingResult:
    """Send the requests of every rate, one rate after the other. on_request: called with
    (requests ended, in all). Raises EyasError when there is no such server."""
    return asyncio.run(_run(url, settings, on_request or (lambda done, total: None)))


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which requests come, the first at 0."""
    source = random.Random(seed)
    gaps = (source.expovariate(rate) for _ in range(count - 1))
    return [0.0, *itertools.accumulate(gaps)]


async def _run(
    url: str, settings: ServingSettings, on_request: Callable[[int, int], None]
) -> ServingResult:
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    async with httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,  # a proxy would be measured too
    ) as client:
        model = settings.model or await _model_name(client, url)
        await _warm_up(client, settings, model)
        total, num_done = len(settings.rates) * settings.num_requests, itertools.count(1)
        results: list[RateResult] = []
        for run, rate in enumerate(settings.rates):
            conversations = settings.conversations(run)
            bodies = [settings.body(model, one, n) for n, one in enumerate(conversations)]
            before = await _counters(client)
            records = await _send(
                client,
                bodies,
                arrivals(rate, len(bodies), settings.seed),
                lambda: on_request(next(num_done), total),
            )
            counters = before, await _counters(client)
            results.append(summarise(rate, records, goals=settings.goals, counters=counters))
    return ServingResult(
        url=url,
        model=model,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        ignore_eos=settings.ignore_eos,
        seed=settings.seed,
        goals=settings.goals,
        rates=tuple(results),
    )


async def _send(
    client: httpx.AsyncClient,
    bodies: Sequence[dict[str, Any]],
    times: Sequence[float],
    on_end: Callable[[], None],
) -> list[RequestRecord]:
    """Send each body at its time, whatever became of the others; wait for all."""
    start = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - start

    async def one(body: dict[str, Any], planned: float) -> RequestRecord:
        record = await stream_chat(client, body, planned=planned, now=now)
        on_end()
        return record

    tasks = []
    for body, planned in zip(bodies, times, strict=True):
        await asyncio.sleep(max(0.0, planned - now()))
        tasks.append(asyncio.create_task(one(body, planned)))
    return list(await asyncio.gather(*tasks))


async def _warm_up(client: httpx.AsyncClient, settings: ServingSettings, model: str) -> None:
    """A few answers that are not counted. Raises EyasError when there is none."""
    for number in range(_NUM_WARM_UP):
        # Not a prompt that is timed: a prefix cache would know it.
        body = settings.body(model, [{"role": "user", "content": "Say hello."}], number)
        record = await stream_chat(client, body, planned=0.0, now=time.perf_counter)
        if record.error is not None:
            raise EyasError(f"the first request failed ({record.error}): look at the server's log")


async def _model_name(client: httpx.AsyncClient, url: str) -> str:
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        text = str(error) or type(error).__name__
        if isinstance(error, httpx.HTTPStatusError):
            status = error.response.status_code
            text = f"/v1/models gave {status}" + (", give --api-key" if status == 401 else "")
        raise EyasError(f"{url} does not answer as a server of models: {text}") from None


async def _counters(client: httpx.AsyncClient) -> dict[str, float]:
    """The server's metrics without labels; empty where it has none."""
    try:
        response = await client.get("/metrics")
    except httpx.HTTPError:
        return {}
    if response.status_code != 200:
        return {}
    found: dict[str, float] = {}
    for line in response.text.splitlines():
        name, _, value = line.partition(" ")
        if not line.startswith("#") and "{" not in name and value:
            found[name] = float(value)
    return found


def _built_in(number: int) -> Messages:
    """A built-in task; those that come again are numbered, for a prefix cache's sake."""
    text = BUILT_IN[number % len(BUILT_IN)]
    if number >= len(BUILT_IN):
        text = f"Task {number + 1}. {text}"
    return [{"role": "user", "content": text}]
