"""The engine's loop: obeys commands between steps and tells what came of them.

It knows nothing of its listeners: they may be in this process or in another one.
"""

from __future__ import annotations

import queue
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from eyas.engine.messages import Abort, Add, Command, Ended, EngineStatus, News, Stop, Verdict
from eyas.types import EyasError

if TYPE_CHECKING:  # the engine brings torch along, which a client of it can do without
    from eyas.engine.engine import Engine

_COUNTERS_EVERY_SECONDS = 0.25

Event = Verdict | News | Ended


class EngineLoop:
    """Runs an engine until told to stop. emit: called in the loop's thread with each event."""

    def __init__(
        self,
        engine: Engine,
        commands: queue.SimpleQueue[Command],
        emit: Callable[[Event], None],
    ) -> None:
        self._engine, self._commands, self._emit = engine, commands, emit
        self._status: EngineStatus | None = None
        self._counters_sent, self._counters_are_old = 0.0, False

    def run(self) -> Ended:
        """Serve; returns the last event, which has been emitted too."""
        try:
            self._tell_status()
            while self._obey():
                outputs = self._engine.step()
                self._counters_are_old = True
                self._tell(News(tuple(outputs), read_status(self._engine)))
            ended = Ended("the server is shutting down", is_death=False)
        except Exception as error:  # whatever it is, clients must hear of it
            reason = f"{type(error).__name__}: {error}"
            ended = Ended(reason, is_death=True, details=traceback.format_exc())
        self._emit(ended)
        return ended

    def _obey(self) -> bool:
        """Carry out commands; waits for one where there is nothing to do. False: stop."""
        while not self._engine.has_work or not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, Stop):
                return False
            if isinstance(command, Add):
                self._add(command)
            elif isinstance(command, Abort):
                self._engine.abort(command.request_id)
            self._tell_status()
        return True

    def _add(self, command: Add) -> None:
        try:
            self._engine.add(
                command.request_id, command.prompt_token_ids, command.params, command.images
            )
        except EyasError as error:
            self._emit(Verdict(command.request_id, str(error), param=error.param))
        except Exception as error:  # whatever it is, it concerns this request alone
            text = f"{type(error).__name__}: {error}"
            self._emit(Verdict(command.request_id, text, is_mistake=False))
        else:
            self._emit(Verdict(command.request_id))

    def _tell_status(self) -> None:
        self._tell(News((), read_status(self._engine)))

    def _tell(self, news: News) -> None:
        now = time.monotonic()
        is_due = now - self._counters_sent > _COUNTERS_EVERY_SECONDS or not self._engine.has_work
        if is_due and self._counters_are_old:
            self._counters_sent, self._counters_are_old = now, False
            news = News(news.outputs, news.status, self._engine.stats.copy())
        if news.outputs or news.counters is not None or news.status != self._status:
            self._status = news.status
            self._emit(news)


def read_status(engine: Engine) -> EngineStatus:
    """How full an engine is."""
    scheduler = engine.scheduler
    return EngineStatus(
        num_running=len(scheduler.admitted),
        num_waiting=len(scheduler.waiting),
        num_free_pages=scheduler.allocator.num_free,
        num_pages=scheduler.allocator.num_usable,
    )
