"""Around every request: its id, who may ask, and one line in the log. Never what was asked.

The line and the metrics tell of a response when its last byte is sent or its client has left.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.server.errors import ApiError, error_response
from eyas.server.exchange import Exchange, entered

logger = logging.getLogger("eyas.access")

ID_HEADER = "x-request-id"
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})  # for probes, which carry no key
_QUIET_PATHS = OPEN_PATHS  # asked every few seconds: logged only where DEBUG is
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class AccessMiddleware:
    """ASGI middleware. api_keys: any of them opens /v1 and the tokenizer; empty: no key needed."""

    def __init__(self, app: ASGIApp, *, api_keys: tuple[str, ...] = ()) -> None:
        self._app = app
        # Digests compare in the same time whatever the key, its length included.
        sent = [key.encode(errors="surrogateescape") for key in api_keys]
        self._digests = [hashlib.sha256(key).digest() for key in sent]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(ID_HEADER, "")
        request_id = given if _CLIENT_ID.fullmatch(given) else uuid.uuid4().hex
        exchange = Exchange(request_id, time.perf_counter())
        status = 499  # unless a response starts: the client has left

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[ID_HEADER] = request_id
            await send(message)

        with entered(exchange):
            try:
                if self._is_allowed(scope["path"], headers):
                    await self._app(scope, receive, send_with_id)
                else:
                    await _refusal()(scope, receive, send_with_id)
            except Exception:  # the outermost layer answers it
                status = 500
                raise
            finally:
                _log(scope, exchange, status)

    def _is_allowed(self, path: str, headers: Headers) -> bool:
        if not self._digests or path in OPEN_PATHS:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        sent = key.strip(" \t").encode("latin-1")  # the bytes as they came
        given = hashlib.sha256(sent).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _refusal() -> ASGIApp:
    text = "an API key is needed: send it as 'Authorization: Bearer KEY'"
    response = error_response(ApiError(401, text, code="invalid_api_key"))
    response.headers["www-authenticate"] = "Bearer"
    return response


def _log(scope: Scope, exchange: Exchange, status: int) -> None:
    level = logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
    if not logger.isEnabledFor(level):
        return
    seconds = time.perf_counter() - exchange.started
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 4),
    }
    if exchange.num_prompt_tokens is not None:
        fields |= {
            "prompt_tokens": exchange.num_prompt_tokens,
            "cached_tokens": exchange.num_cached_tokens,
            "completion_tokens": exchange.num_completion_tokens,
            "outcome": exchange.outcome or "aborted",
        }
    if exchange.error is not None:
        fields["error"] = exchange.error
    logger.log(level, "%s", _as_text(fields), extra={"fields": fields})


def _as_text(fields: dict[str, Any]) -> str:
    shown = dict(fields)
    first = "{} {!r} {}".format(*(shown.pop(name) for name in ("method", "path", "status")))
    return " ".join([first, *(f"{name}={value}" for name, value in shown.items())])
