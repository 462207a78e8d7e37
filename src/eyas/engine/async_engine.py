"""The engine behind a thread, for asyncio callers: submit, stream, abort.

The thread owns the engine; callers reach it through a queue of commands that is read before each
step. A request that the engine refuses fails alone; an exception in a step ends everything, with
its text on every open stream.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from eyas.engine.engine import Engine
from eyas.types import EyasError, FinishReason, SamplingParams, StepOutput


class EngineDeadError(RuntimeError):
    """The engine's thread has ended; its text says why."""


class AsyncEngine:
    """Runs an Engine in a thread of its own. Call `start` inside the event loop that uses it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Queue[StepOutput | EyasError]] = {}
        self._thread = threading.Thread(target=self._run, name="eyas-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: str | None = None

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self._engine.max_model_len

    @property
    def error(self) -> str | None:
        """Why the engine died, None while it lives."""
        return self._death

    def start(self) -> None:
        """Start the thread; outputs go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current step; open streams end as aborted."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncIterator[StepOutput]:
        """Outputs of one request until it finishes. Closing the iterator aborts the request.

        Raises EyasError if the engine refuses the request (before the first output) and
        EngineDeadError if the engine dies.
        """
        if self._death is not None:
            raise EngineDeadError(self._death)
        stream: asyncio.Queue[StepOutput | EyasError] = asyncio.Queue()
        self._streams[request_id] = stream
        self._commands.put(lambda: self._add(request_id, prompt_token_ids, params))
        try:
            while True:
                output = await stream.get()
                if isinstance(output, EyasError):
                    raise output
                if output.finish_reason is FinishReason.ERROR:
                    raise EngineDeadError(output.error or "the engine died")
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            del self._streams[request_id]
            self._commands.put(lambda: self._engine.abort(request_id))

    def _add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        try:
            self._engine.add(request_id, prompt, params)
        except EyasError as error:
            self._deliver(request_id, error)

    def _run(self) -> None:
        try:
            while True:
                # Nothing to do: sleep until a command comes. Otherwise take what is there.
                while not self._engine.has_work or not self._commands.empty():
                    command = self._commands.get()
                    if command is None:
                        self._end(FinishReason.ABORT, "the server is shutting down")
                        return
                    command()
                for output in self._engine.step():
                    self._deliver(output.request_id, output)
        except Exception as error:  # whatever it is, clients must hear of it
            self._end(FinishReason.ERROR, f"{type(error).__name__}: {error}")
            raise

    def _end(self, reason: FinishReason, text: str) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._end_streams, reason, text)

    def _end_streams(self, reason: FinishReason, text: str) -> None:
        self._death = text
        for request_id in self._streams:
            self._put(request_id, StepOutput(request_id, (), reason, error=text))

    def _deliver(self, request_id: str, output: StepOutput | EyasError) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._put, request_id, output)

    def _put(self, request_id: str, output: StepOutput | EyasError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:  # the client may have left
            stream.put_nowait(output)
