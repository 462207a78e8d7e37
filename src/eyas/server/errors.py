"""Errors in the shape that OpenAI clients understand, for every way in which a request can fail."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from eyas.engine.async_engine import EngineDeadError, RequestFailedError
from eyas.server.exchange import current_exchange
from eyas.types import EyasError, TooLongError

logger = logging.getLogger(__name__)

_MAX_SHOWN = 100  # characters of what a client made up: a body's worth of them is no message


class ApiError(Exception):
    """A request that is answered by an HTTP error. param: the field at fault; code: for scripts."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param = None if param is None else shortened(param)

    def body(self) -> dict[str, Any]:
        """The JSON object that clients get."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def shortened(text: str) -> str:
    """A client's own text as errors show it: its beginning."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def as_api_error(error: Exception) -> ApiError:
    """Any exception as what its client is told; our own mistakes are logged, not shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EyasError):
        code = "context_length_exceeded" if isinstance(error, TooLongError) else "invalid_value"
        return ApiError(400, str(error), param=error.param, code=code)
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"the engine has ended: {error}", code="engine_dead")
    if isinstance(error, RequestFailedError):
        logger.error("a request failed: %s", error)
        return ApiError(500, f"this request failed, others go on: {error}", code="internal")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "internal server error: the server's log says more", code="internal")


def told_error(error: Exception) -> ApiError:
    """The same, noted for the request's line in the log."""
    api_error = as_api_error(error)
    if (exchange := current_exchange()) is not None:
        exchange.refuse(api_error.code, api_error.param)
    return api_error


def error_response(error: Exception, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The response to a request that failed before its first byte."""
    api_error = told_error(error)
    return JSONResponse(api_error.body(), api_error.status, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every failure, routing included, in the same shape."""

    def on_error(request: Request, error: Exception) -> JSONResponse:
        headers = None
        if isinstance(error, HTTPException):  # no such route or method
            headers = error.headers  # the methods that there are
            text = f"{error.detail}: {request.method} {shortened(request.url.path)}"
            code = error.detail.lower().replace(" ", "_")  # "not_found", "method_not_allowed"
            error = ApiError(error.status_code, text, code=code)
        return error_response(error, headers)

    for kind in (
        ApiError,
        EyasError,
        EngineDeadError,
        RequestFailedError,
        HTTPException,
        Exception,
    ):
        app.add_exception_handler(kind, on_error)
