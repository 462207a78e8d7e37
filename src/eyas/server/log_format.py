"""The log's two formats: lines to read, or a JSON object a line; both with the request's id."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Literal

from eyas.server.exchange import current_exchange

LogFormat = Literal["text", "json"]


def configure_logging(log_format: LogFormat) -> None:
    """Log to stderr, unless logging is configured already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _request_id() -> str | None:
    exchange = current_exchange()
    return None if exchange is None else exchange.request_id


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The usual line, the request's id at the end of its first line."""
        text = super().format(record)
        request_id = _request_id()
        if request_id is None:
            return text
        first, newline, rest = text.partition("\n")
        return f"{first} request={request_id}{newline}{rest}"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One object: time (UTC), level, logger, message, and what the record brings."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := _request_id()) is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
