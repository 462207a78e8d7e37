"""Answers as server-sent events, and what becomes of them when the client or the engine leaves."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from eyas.server.errors import told_error
from eyas.server.formats import Envelope, usage
from eyas.server.metrics import Meter
from eyas.server.protocol import StreamUsage
from eyas.server.service import Generation
from eyas.server.transport import ClientGoneError, unless_client_leaves

_DONE = b"data: [DONE]\n\n"


def sse(data: dict[str, Any]) -> bytes:
    """One event. Non-ASCII text is escaped: some clients take U+2028 or U+0085 for a line's end."""
    return b"data: " + json.dumps(data, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


async def events(
    generation: Generation, envelope: Envelope, meter: Meter, *, told: StreamUsage
) -> AsyncIterator[bytes]:
    """The events of a streamed answer. A failure is an error event, after which nothing comes."""
    try:
        async with aclosing(_chunks(generation, envelope)) as chunks:
            async for chunk in chunks:
                if told is StreamUsage.ALWAYS:
                    chunk["usage"] = usage(generation)
                elif told is StreamUsage.LAST:
                    chunk["usage"] = None
                yield sse(chunk)
    except Exception as error:
        meter.end("error")
        yield sse(told_error(error).body())
        return
    meter.end("ok", num_cached_tokens=generation.num_cached_tokens)
    if told is not StreamUsage.NONE:
        yield sse(envelope.chunk() | {"usage": usage(generation)})
    yield _DONE


async def _chunks(
    generation: Generation, envelope: Envelope
) -> AsyncGenerator[dict[str, Any], None]:
    form = envelope.form
    started = set()
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            if piece.index not in started:
                started.add(piece.index)
                if (start := form.start(piece.index)) is not None:
                    yield envelope.chunk(start)
            if piece.text or piece.logprobs:
                yield envelope.chunk(form.text(piece))
            if piece.finish_reason is not None:
                yield envelope.chunk(form.finish(piece))


class EventStream(StreamingResponse):
    """Sends events until they end or the client leaves, which aborts the generation at once."""

    def __init__(self, generation: Generation, content: AsyncIterator[bytes], meter: Meter) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._generation, self._meter = generation, meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; starlette's own notices a client that left only when it sends."""
        try:
            await unless_client_leaves(receive, self.stream_response(send))
        except ClientGoneError:
            pass
        finally:
            self._generation.close()
            self._meter.end("aborted")
