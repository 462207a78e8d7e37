"""When tokens became known, and the rates that follow."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from eyas.types import StepOutput


@dataclasses.dataclass(frozen=True)
class Rates:
    """Speed of one batch, in tokens of all its requests together.

    seconds: from submission to the last token. first_token_seconds: until every request had its
    first. decode_tokens, decode_seconds: what came after that moment, without any prefill.
    """

    num_tokens: int
    seconds: float
    first_token_seconds: float
    decode_tokens: int
    decode_seconds: float

    @classmethod
    def joined(cls, batches: Sequence[Rates]) -> Rates:
        """Of batches that ran one after the other; the time to the first token is their mean."""
        return cls(
            num_tokens=sum(b.num_tokens for b in batches),
            seconds=sum(b.seconds for b in batches),
            first_token_seconds=sum(b.first_token_seconds for b in batches) / len(batches),
            decode_tokens=sum(b.decode_tokens for b in batches),
            decode_seconds=sum(b.decode_seconds for b in batches),
        )

    @property
    def tokens_per_second(self) -> float:
        """All new tokens over the whole time, prefill included."""
        return self.num_tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens a second after the prefill; None when the first read was the last."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else None


class TokenClock:
    """Notes when tokens of a batch arrive; starts when made.

    Tokens often arrive several at once (a verified draft; a prompt's token that is read together
    with the round after it), so what counts is tokens, never arrivals.
    """

    def __init__(
        self, num_requests: int = 1, *, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._now = now
        self._num_requests = num_requests
        self._begun: set[str] = set()
        self._start = self._first = self._last = now()
        self._num_tokens = self._num_first = 0

    def add(self, num_tokens: int, request_id: str = "", *, with_prefill: bool) -> None:
        """Tokens of a request have become known now.

        with_prefill: they were read together with the token that the prefill gave, so that no
        time of decoding is known to belong to them.
        """
        self._num_tokens += num_tokens
        self._last = self._now()
        if with_prefill:
            self._begun.add(request_id)
            self._first, self._num_first = self._last, self._num_tokens

    def add_step(self, output: StepOutput) -> None:
        """What the engine told; it reads a prompt's token and the first round in one turn."""
        num_tokens = len(output.new_token_ids)
        self.add(num_tokens, output.request_id, with_prefill=output.num_rounds <= 1)

    def rates(self) -> Rates:
        """What has been measured so far. Every request must have begun."""
        assert len(self._begun) == self._num_requests, "a request has no token"
        return Rates(
            num_tokens=self._num_tokens,
            seconds=self._last - self._start,
            first_token_seconds=self._first - self._start,
            decode_tokens=self._num_tokens - self._num_first,
            decode_seconds=self._last - self._first,
        )
