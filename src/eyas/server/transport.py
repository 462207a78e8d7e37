"""HTTP below the API: bodies with a limit, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from eyas.server.errors import ApiError

BODY_SECONDS = 60.0  # for a whole body
_MOST_DIGITS = 18  # of a length that is read as a number

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client closed the connection; nobody is there to answer."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises ApiError (413) as soon as it is known to be too long, ApiError (408) if it takes too
    long to come, ClientGoneError if the client leaves before its end.
    """
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read_body(request, max_bytes)
    except TimeoutError as error:
        text = f"the body did not come within {BODY_SECONDS:.0f} s"
        raise ApiError(408, text, code="body_timeout") from error


async def _read_body(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    body = bytearray()
    if not declared.isdecimal() or (len(declared) <= _MOST_DIGITS and int(declared) <= max_bytes):
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    break
            else:
                return bytes(body)
        except ClientDisconnect as error:
            raise ClientGoneError from error
    raise ApiError(413, f"the body is longer than {max_bytes} bytes", code="body_too_large")


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`; cancel it and raise ClientGoneError when the client disconnects first.

    receive: of a request whose body has been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
