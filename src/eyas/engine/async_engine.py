"""The engine for asyncio callers: submit, stream, abort; its loop is in a thread of its own.

A request that the engine refuses fails alone; an exception in a step ends everything, with its
text on every open stream. `EngineProcess` has the same interface with the loop in a process.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from eyas.engine.engine_loop import EngineLoop, Event, read_status
from eyas.engine.limits import most_new_tokens
from eyas.engine.messages import (
    Abort,
    Add,
    Command,
    Ended,
    EngineInfo,
    EngineStatus,
    News,
    Stop,
    Verdict,
)
from eyas.engine.stats import EngineCounters
from eyas.types import EyasError, ImageInput, SamplingParams, StepOutput

if TYPE_CHECKING:  # the engine brings torch along, which a client of it can do without
    from eyas.engine.engine import Engine


class EngineDeadError(RuntimeError):
    """The engine has ended; the text says why."""


class RequestFailedError(RuntimeError):
    """The engine gave up one request by a fault that is not the client's; others go on."""


class RequestStream:
    """Outputs of one accepted request, in order: an asynchronous iterator.

    It ends after the output with a finish reason and raises EngineDeadError if the engine ends
    first. Whoever holds it must `close` it: that aborts what still runs.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._queue: asyncio.Queue[StepOutput | Exception | None] = asyncio.Queue()
        self._ended = False

    def put(self, item: StepOutput | Exception | None) -> None:
        """Deliver an output, an error, or None for "accepted"; from the event loop's thread."""
        self._queue.put_nowait(item)

    async def accepted(self) -> None:
        """Wait for the engine's verdict. Raises EyasError or EngineDeadError."""
        verdict = await self._queue.get()
        if isinstance(verdict, Exception):
            raise verdict
        assert verdict is None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StepOutput:
        if self._ended:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Exception):
            self._ended = True
            raise item
        assert item is not None
        self._ended = item.finish_reason is not None
        return item

    def close(self) -> None:
        """Abort the request if it still runs: its slot and pages become free. May be repeated."""
        self._ended = True
        self._close()


class EngineHandle:
    """What all clients of an engine have in common: the streams, and what is known of it.

    Lives in an event loop's thread, where `_receive` is called with what the engine tells.
    """

    info: EngineInfo

    def __init__(self) -> None:
        self._streams: dict[str, RequestStream] = {}
        self._error: str | None = None
        self._died, self._gone = asyncio.Event(), asyncio.Event()
        self._status = EngineStatus(0, 0, 0, 0)
        self.counters = EngineCounters()
        self.death_details = ""  # the traceback, where there is one

    @property
    def error(self) -> str | None:
        """Why the engine has ended, None while it lives."""
        return self._error

    def status(self) -> EngineStatus:
        """What the engine held after its last step or command."""
        return self._status

    async def died(self) -> str:
        """Wait until the engine dies unasked, and say of what. `stop` is no such end."""
        await self._died.wait()
        assert self._error is not None
        return self._error

    async def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        images: Sequence[ImageInput] = (),
    ) -> RequestStream:
        """Queue a request; returns once the engine has accepted it, before any output.

        Raises EyasError if the engine refuses the request, RequestFailedError if it could not be
        taken by a fault of ours, and EngineDeadError if the engine has ended.
        """
        if self._error is not None:
            raise EngineDeadError(self._error)
        if request_id in self._streams:
            raise EyasError(f"request id {request_id!r} is in use")
        most_new_tokens(self.info, len(prompt_token_ids), params)  # before copies of it are made
        stream = RequestStream(lambda: self._close(request_id))
        self._streams[request_id] = stream
        self._send(Add(request_id, tuple(prompt_token_ids), params, tuple(images)))
        try:
            await stream.accepted()
        except BaseException:  # a caller that gives up while it waits is one that leaves
            stream.close()
            raise
        return stream

    def _send(self, command: Command) -> None:
        raise NotImplementedError

    def _close(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._send(Abort(request_id))

    def _receive(self, event: Event) -> None:
        if isinstance(event, News):
            self._status = event.status
            self.counters = event.counters or self.counters
            for output in event.outputs:
                self._put(output.request_id, output)
        elif isinstance(event, Verdict):
            self._put(event.request_id, _verdict(event))
        else:
            self._end(event)

    def _end(self, event: Ended) -> None:
        if self._error is not None:  # one report
            return
        self._error, self.death_details = event.reason, event.details
        if event.is_death:
            self._died.set()
        for stream in self._streams.values():
            stream.put(EngineDeadError(event.reason))

    def _put(self, request_id: str, item: StepOutput | Exception | None) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:  # the client may have left
            stream.put(item)


def _verdict(event: Verdict) -> Exception | None:
    if event.error is None:
        return None
    if event.is_mistake:
        return EyasError(event.error, param=event.param)
    return RequestFailedError(event.error)


class AsyncEngine(EngineHandle):
    """Runs an Engine in a thread of its own. Call `start` inside the event loop that uses it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.info = engine.info
        self._status = read_status(engine)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._engine_loop = EngineLoop(engine, self._commands, self._emit)
        self._thread = threading.Thread(
            target=self._engine_loop.run, name="eyas-engine", daemon=True
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread; outputs go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current step; open streams raise EngineDeadError."""
        self._send(Stop())
        await asyncio.to_thread(self._thread.join)

    def _send(self, command: Command) -> None:
        self._commands.put(command)

    def _emit(self, event: Event) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._receive, event)
