"""What a benchmark over HTTP found, and how it follows from the requests."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from eyas.bench.http_client import RequestRecord
from eyas.bench.loops import is_looping

_WORD = re.compile(r"\w+|[^\w\s]")
# The server's counters of rounds, each request once, and of the tokens that they emitted.
ROUNDS, ROUND_TOKENS = "eyas_round_requests_total", "eyas_round_tokens_total"


@dataclasses.dataclass(frozen=True)
class Percentiles:
    """In seconds; linear between neighbouring values."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """None without values."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(*(_quantile(ordered, share) for share in (0.5, 0.9, 0.99)))


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


@dataclasses.dataclass(frozen=True)
class ServedAcceptance:
    """Tokens a request and round by the server's own counters, the bonus token included.

    length: 1 without a draft; None when the server does not count, or when outputs loop: the
    counters are of all requests together, and a draft guesses a repetition too well.
    """

    length: float | None
    num_looping: int
    num_outputs: int


@dataclasses.dataclass(frozen=True)
class Goals:
    """A request is good when its first token came in time, and the others on average; seconds."""

    first_token: float
    inter_token: float


@dataclasses.dataclass(frozen=True)
class RateResult:
    """One arrival rate. rate: requests a second that were to arrive; requests_per_second,
    tokens_per_second: whole answers and their tokens, from the first arrival to the last end;
    goodput: good requests a second. first_token counts from when a request was to be sent;
    inter_token: each token's share of the time since the chunk before. errors: by kind.
    client_lag: the longest time by which a request was sent too late.
    """

    rate: float
    num_requests: int
    num_whole: int
    errors: dict[str, int]
    seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    requests_per_second: float
    tokens_per_second: float
    goodput: float
    first_token: Percentiles | None
    inter_token: Percentiles | None
    whole: Percentiles | None
    acceptance: ServedAcceptance
    client_lag: float


def summarise(
    rate: float,
    records: Sequence[RequestRecord],
    *,
    goals: Goals,
    counters: tuple[Mapping[str, float], Mapping[str, float]],
) -> RateResult:
    """Of all requests of one rate; counters: the server's before and after."""
    whole = [record for record in records if record.error is None]
    seconds = max(record.ended for record in records) - min(record.planned for record in records)
    good = [
        record
        for record in whole
        if record.first_token_seconds <= goals.first_token
        and record.mean_inter_token_seconds <= goals.inter_token
    ]
    num_tokens = sum(record.num_tokens for record in whole)
    gaps = [gap / count for r in whole for gap, count in r.gaps for _ in range(count)]
    return RateResult(
        rate=rate,
        num_requests=len(records),
        num_whole=len(whole),
        errors=dict(Counter(r.error for r in records if r.error is not None)),
        seconds=seconds,
        num_prompt_tokens=sum(record.num_prompt_tokens for record in whole),
        num_cached_tokens=sum(record.num_cached_tokens for record in whole),
        num_tokens=num_tokens,
        requests_per_second=len(whole) / seconds,
        tokens_per_second=num_tokens / seconds,
        goodput=len(good) / seconds,
        first_token=Percentiles.of([record.first_token_seconds for record in whole]),
        inter_token=Percentiles.of(gaps),
        whole=Percentiles.of([record.ended - record.planned for record in whole]),
        acceptance=served_acceptance([record.text for record in whole], *counters),
        client_lag=max(record.sent - record.planned for record in records),
    )


def served_acceptance(
    texts: Sequence[str], before: Mapping[str, float], after: Mapping[str, float]
) -> ServedAcceptance:
    """From texts, whose loops are looked for word by word, and the server's counters."""
    num_looping = sum(map(text_loops, texts))
    rounds = after.get(ROUNDS, 0.0) - before.get(ROUNDS, 0.0)
    tokens = after.get(ROUND_TOKENS, 0.0) - before.get(ROUND_TOKENS, 0.0)
    length = tokens / rounds if rounds and not num_looping else None
    return ServedAcceptance(length, num_looping, len(texts))


def text_loops(text: str) -> bool:
    """Whether a text repeats itself, by its words and marks."""
    numbers: dict[str, int] = {}
    return is_looping([numbers.setdefault(w, len(numbers)) for w in _WORD.findall(text)])


@dataclasses.dataclass(frozen=True)
class ServingResult:
    """All rates. url: the server's; model: as it calls it."""

    url: str
    model: str
    max_tokens: int
    temperature: float
    ignore_eos: bool
    seed: int
    goals: Goals
    rates: tuple[RateResult, ...]

    @property
    def ok(self) -> bool:
        """Whether every request got a whole answer."""
        return all(not rate.errors for rate in self.rates)
