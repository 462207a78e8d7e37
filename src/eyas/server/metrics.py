"""/metrics for Prometheus: what clients met, measured here, and what the engine counted itself."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from eyas.engine.stats import EngineCounters
from eyas.server.exchange import Exchange, current_exchange
from eyas.server.service import Piece
from eyas.server.state import Phase, ServerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_TOKEN_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
_WHOLE_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 900)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, state: ServerState) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "eyas_requests",
            "Generation requests by how they ended: ok, refused (4xx), aborted (the client left), "
            "error.",
            ["endpoint", "outcome"],
            registry=registry,
        )
        self.answers = Counter(
            "eyas_answers", "Finished answers by reason.", ["finish_reason"], registry=registry
        )
        self.prompt_tokens = Counter(
            "eyas_prompt_tokens", "Prompt tokens, each prompt once.", registry=registry
        )
        self.cached_tokens = Counter(
            "eyas_prefix_cache_hit_tokens",
            "Prompt tokens that the prefix cache had, of finished requests.",
            registry=registry,
        )
        self.queried_tokens = Counter(
            "eyas_prefix_cache_queried_tokens",
            "Prompt tokens that were looked up in it, of the same requests.",
            registry=registry,
        )
        self.generated_tokens = Counter(
            "eyas_generation_tokens", "Generated tokens of all answers.", registry=registry
        )
        self.first_token = Histogram(
            "eyas_time_to_first_token_seconds",
            "From a request's arrival to the first token of each answer.",
            buckets=_FIRST_BUCKETS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "eyas_inter_token_seconds",
            "Time between tokens of an answer; tokens that come together share it.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self.whole = Histogram(
            "eyas_request_seconds",
            "From arrival to the last byte's making.",
            buckets=_WHOLE_BUCKETS,
            registry=registry,
        )
        registry.register(_EngineCollector(state))
        ProcessCollector(registry=registry)

    def meter(self, endpoint: str) -> Meter:
        """Measures one generation request from now on."""
        return Meter(self, endpoint, current_exchange())

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)


class Meter:
    """One generation request. `end` it in any case; the first outcome counts."""

    def __init__(self, metrics: Metrics, endpoint: str, exchange: Exchange | None) -> None:
        self._metrics, self._endpoint = metrics, endpoint
        self._started = time.perf_counter()
        self._exchange = exchange or Exchange("", self._started)
        self._last: dict[int, float] = {}  # by choice
        self._ended = False

    def accept(self, num_prompt_tokens: int) -> None:
        """The engine has taken the request."""
        self._metrics.prompt_tokens.inc(num_prompt_tokens)
        self._exchange.num_prompt_tokens = num_prompt_tokens

    def piece(self, piece: Piece) -> None:
        """News of a choice."""
        if piece.num_tokens:
            self._tokens(piece.index, piece.num_tokens)
        if piece.finish_reason is not None:
            self._metrics.answers.labels(piece.finish_reason.value).inc()

    def end(self, outcome: str, *, num_cached_tokens: int | None = None) -> None:
        """ok, refused, aborted or error. May be repeated."""
        if self._ended:
            return
        self._ended, self._exchange.outcome = True, outcome
        self._metrics.requests.labels(self._endpoint, outcome).inc()
        self._metrics.whole.observe(time.perf_counter() - self._started)
        if num_cached_tokens is not None:
            self._exchange.num_cached_tokens = num_cached_tokens
            self._metrics.cached_tokens.inc(num_cached_tokens)
            self._metrics.queried_tokens.inc(self._exchange.num_prompt_tokens or 0)

    def _tokens(self, index: int, number: int) -> None:
        now = time.perf_counter()
        last = self._last.get(index)
        if last is None:
            self._metrics.first_token.observe(now - self._started)
        else:
            for _ in range(number):
                self._metrics.inter_token.observe((now - last) / number)
        self._last[index] = now
        self._exchange.num_completion_tokens += number
        self._metrics.generated_tokens.inc(number)


class _EngineCollector(Collector):
    """Reads what the engine last told, at each scrape."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        ready = self._state.ready()["status"] is Phase.READY
        yield _gauge("eyas_ready", "1 if completions work.", float(ready))
        service = self._state.running_service
        if service is None:
            return
        status = service.engine.status()
        used = status.num_pages - status.num_free_pages
        yield _gauge("eyas_requests_running", "Requests in a slot.", status.num_running)
        yield _gauge("eyas_requests_waiting", "Requests in the queue.", status.num_waiting)
        yield _gauge("eyas_kv_pages", "KV pages that requests can have.", status.num_pages)
        yield _gauge("eyas_kv_pages_used", "KV pages that requests hold.", used)
        share = used / status.num_pages if status.num_pages else 0.0
        yield _gauge("eyas_kv_use_ratio", "Held KV pages by all of them.", share)
        yield from _speculation(service.engine.counters)
        yield from _times(service.engine.counters)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _speculation(counters: EngineCounters) -> Iterator[Metric]:
    by_level = {
        "eyas_draft_tokens": ("Drafted tokens that were verified.", counters.num_drafted),
        "eyas_accepted_draft_tokens": ("Drafted tokens kept.", counters.num_accepted),
    }
    for name, (text, numbers) in by_level.items():
        family = CounterMetricFamily(name, text, labels=["position"])
        for level, number in enumerate(numbers, start=1):
            family.add_metric([str(level)], number)
        yield family
    rate = GaugeMetricFamily(
        "eyas_acceptance_rate", "Kept by verified since the start.", labels=["position"]
    )
    pairs = zip(counters.num_accepted, counters.num_drafted, strict=True)
    for level, (kept, drafted) in enumerate(pairs, start=1):
        rate.add_metric([str(level)], kept / drafted if drafted else 0.0)
    yield rate
    requests, tokens = counters.num_round_requests, counters.num_round_tokens
    text = "Rounds, each once for every request in it."
    yield CounterMetricFamily("eyas_round_requests", text, value=requests)
    text = "Tokens that rounds emitted, the bonus included."
    yield CounterMetricFamily("eyas_round_tokens", text, value=tokens)
    text = "Tokens by request and round since the start; 1 without speculation."
    yield _gauge("eyas_acceptance_length", text, tokens / requests if requests else 0.0)


def _times(counters: EngineCounters) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "eyas_preemptions", "Requests sent back to the queue.", value=counters.num_preemptions
    )
    yield CounterMetricFamily(
        "eyas_prefill_seconds", "Time in prefill launches.", value=counters.prefill_seconds
    )
    labels = ["batch", "shape"]
    rounds = CounterMetricFamily("eyas_rounds", "Rounds by size and draft shape.", labels=labels)
    seconds = CounterMetricFamily(
        "eyas_round_seconds",
        "Time in rounds: round (launch and wait), of it draft and verify where they can be told "
        "apart, and host (the rest of the turn).",
        labels=[*labels, "part"],
    )
    for (batch, shape), times in sorted(counters.rounds.items()):
        rounds.add_metric([str(batch), shape], times.num_rounds)
        for part, value in sorted(times.seconds.items()):
            seconds.add_metric([str(batch), shape, part], value)
    yield rounds
    yield seconds
