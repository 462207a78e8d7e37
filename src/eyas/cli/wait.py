"""`eyas wait`: until a server answers, for scripts."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated, Any

import typer

from eyas.config import ConfigError

EXIT_READY, EXIT_FAILED, EXIT_TIMEOUT = 0, 2, 3
_EVERY_SECONDS = 0.5
_ENDS = ("failed", "stopping")


def wait(
    url: Annotated[str, typer.Argument(metavar="URL", help="For example http://127.0.0.1:8000.")],
    *,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait at most.")] = 1800.0,
) -> int:
    """Wait until a server is ready, and tell how far it is.

    Exits with 0 when it is, with 2 when it has failed (its reason is told), with 3 when the time is
    over. It need not run yet.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{url!r} is no URL of a server: write it like http://127.0.0.1:8000")
    deadline = time.monotonic() + timeout
    told, was_there = "", False
    while True:
        state = _ready(f"{parts.scheme}://{parts.netloc}/ready")
        text = _describe(state) if state is not None else "nobody answers yet"
        if state is None and was_there:
            print(f"the server has ended; it was last {told}", file=sys.stderr)
            return EXIT_FAILED
        if text != told:
            print(text, file=sys.stderr)
            told = text
        if state is not None:
            was_there = True
            if state["status"] == "ready":
                return EXIT_READY
            if state["status"] in _ENDS:
                return EXIT_FAILED
        if time.monotonic() >= deadline:
            print(f"not ready after {timeout:g} s: {told}", file=sys.stderr)
            return EXIT_TIMEOUT
        time.sleep(min(_EVERY_SECONDS, max(deadline - time.monotonic(), 0)))


def _ready(url: str) -> dict[str, Any] | None:
    """What /ready tells; None where no Eyas server answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:  # 503 until it is ready
        body = error.read()
    except (OSError, ValueError):
        return None
    try:
        state = json.loads(body)
    except ValueError:
        return None
    return state if isinstance(state, dict) and "status" in state else None


def _describe(state: dict[str, Any]) -> str:
    detail = state.get("detail")
    return f"{state['status']}: {detail}" if detail else str(state["status"])
