"""One HTTP request and what is known of its answer, for the log and the metrics."""

from __future__ import annotations

import contextvars
import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager

_PLAIN_FIELD = re.compile(r"[A-Za-z0-9_.\[\]-]{1,80}")


@dataclasses.dataclass
class Exchange:
    """started: of time.perf_counter. error: code and field of a refusal, never its text."""

    request_id: str
    started: float
    num_prompt_tokens: int | None = None
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    outcome: str | None = None
    error: str | None = None

    def refuse(self, code: str | None, param: str | None) -> None:
        """Note why; a field's name that a client made up may be anything and is left out."""
        self.error = code
        if param is not None and _PLAIN_FIELD.fullmatch(param):
            self.error = f"{code}:{param}"


_current: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar("exchange", default=None)


@contextmanager
def entered(exchange: Exchange) -> Iterator[None]:
    """Make it the current one of this context."""
    token = _current.set(exchange)
    try:
        yield
    finally:
        _current.reset(token)


def current_exchange() -> Exchange | None:
    """The request that is being answered in this context."""
    return _current.get()
