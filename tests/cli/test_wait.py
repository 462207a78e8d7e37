"""`eyas wait` beside servers that come, fail, vanish or take their time."""

import http.server
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from fixtures.command_line import run

State = dict[str, Any]
LOADING: State = {"status": "loading", "detail": "loading target: 40 %"}


@contextmanager
def server(states: Sequence[State | None]) -> Iterator[str]:
    """Tells its states one after the other; None closes it."""
    left = list(states)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/ready"
            state = left.pop(0) if len(left) > 1 else left[0]
            if state is None:
                self.server.socket.close()
                self.close_connection = True
                return
            body = json.dumps(state).encode()
            self.send_response(200 if state["status"] == "ready" else 503)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_address[1]}"
        http_server.shutdown()


def test_a_server_that_becomes_ready() -> None:
    with server([LOADING, {"status": "warming"}, {"status": "ready"}]) as url:
        ran = run("wait", f"{url}/", "--timeout", 20)
    assert (ran.code, ran.out) == (0, "")
    assert ran.err == "loading: loading target: 40 % warming ready"  # joined lines


def test_a_server_that_fails() -> None:
    with server([LOADING, {"status": "failed", "detail": "rank 1 was killed"}]) as url:
        ran = run("wait", url, "--timeout", 20)
    assert ran.code == 2
    assert ran.err.endswith("failed: rank 1 was killed")


def test_a_server_that_vanishes() -> None:
    with server([LOADING, None]) as url:
        ran = run("wait", url, "--timeout", 20)
    assert ran.code == 2
    assert "the server has ended; it was last loading: loading target: 40 %" in ran.err


def test_the_time_is_over() -> None:
    with server([LOADING]) as url:
        ran = run("wait", url, "--timeout", 0.1)
    assert ran.code == 3
    assert "not ready after 0.1 s: loading: loading target: 40 %" in ran.err


def test_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ran = run("wait", f"http://127.0.0.1:{port}", "--timeout", 0)
    assert ran.code == 3
    assert "nobody answers yet" in ran.err


@pytest.mark.parametrize("url", ["localhost:8000", "8000", "file:///etc/passwd"])
def test_no_url(url: str) -> None:
    ran = run("wait", url)
    assert ran.code == 1
    assert "write it like http://127.0.0.1:8000" in ran.err
