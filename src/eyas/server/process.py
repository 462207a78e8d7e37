"""The front end as a process: uvicorn under our own signals."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import threading
from collections.abc import Generator
from typing import Any

import uvicorn

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 5  # for the last bytes of open responses
_KEEP_ALIVE_SECONDS = 60


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own: it would end the process by the signal."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                # Not httptools where it is installed: with it uvicorn does not see a client leave
                # that has sent its next request already.
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals alone."""
        yield


@dataclasses.dataclass(frozen=True)
class Stop:
    """asked: no new requests; at_once: do not wait for running ones either."""

    asked: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    at_once: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def on_signal(self) -> None:
        """A signal asks; one more does not wait."""
        if self.asked.is_set():
            self.at_once.set()
        else:
            logger.info("stopping when the running requests are done; once more to stop at once")
            self.asked.set()


@contextlib.contextmanager
def stop_on_signals() -> Generator[Stop, None, None]:
    """Events that SIGINT and SIGTERM set, where this is the main thread."""
    stop, loop = Stop(), asyncio.get_running_loop()
    in_main_thread = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
    for number in signals:
        loop.add_signal_handler(number, stop.on_signal)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
