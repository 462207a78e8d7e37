"""Rank 0 leads: what its worker is told, the workers of the other ranks are told first (D10).

Every rank then makes the same calls with the same plain data, and meets the others in the
collectives of its models. Results are the first rank's; all ranks have the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from eyas.engine.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")


class Followers(Protocol):
    """The other ranks. What goes wrong there is raised here, by the next call at the latest."""

    def tell(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Have each rank call function(worker, ...) after what it was told before; returns at
        once. The function must be importable there, the arguments plain data."""

    def explain(self, error: Exception) -> Exception:
        """What to raise for an error of the first rank: that of another rank, if it was the
        cause."""

    def on_failure(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the report, in another thread, when a rank fails or hangs."""

    def busy(self) -> AbstractContextManager[None]:
        """The first rank does something that must not take long."""

    def stop(self) -> None:
        """End them."""


def _led(method: Callable[Concatenate[Worker, P], T]) -> Callable[Concatenate[Worker, P], T]:
    def call(self: Worker, /, *args: P.args, **kwargs: P.kwargs) -> T:
        assert isinstance(self, LeadingWorker)
        self.followers.tell(method, *args, **kwargs)
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            raise self.followers.explain(error) from error

    functools.update_wrapper(call, method)
    return call


class LeadingWorker(Worker):
    """The worker of rank 0. Arguments as Worker's."""

    def __init__(self, *args: Any, followers: Followers, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.followers = followers

    admit = _led(Worker.admit)
    set_pages = _led(Worker.set_pages)
    release = _led(Worker.release)
    prefill = _led(Worker.prefill)
    round = _led(Worker.round)

    def capture(self, *, progress: Callable[[int, int], None] | None = None) -> None:
        """As Worker.capture, on all ranks; progress of this one."""
        self.followers.tell(Worker.capture)
        super().capture(progress=progress)

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call function(worker, ...) on all ranks; the result of this one."""
        self.followers.tell(function, *args, **kwargs)
        return function(self, *args, **kwargs)

    def busy(self) -> AbstractContextManager[None]:
        """See Worker: what takes longer than the watchdog allows is a failure."""
        return self.followers.busy()

    def on_failure(self, tell: Callable[[str], None]) -> None:
        """See Worker."""
        self.followers.on_failure(tell)

    def close(self) -> None:
        """End the other ranks."""
        self.followers.stop()
