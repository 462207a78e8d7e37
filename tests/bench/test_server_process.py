"""A server that a benchmark starts: what is run, waited for and ended. A stub takes its place."""

import sys
import time
from pathlib import Path

import pytest

from eyas.bench import server_process
from eyas.bench.server_process import running_server
from eyas.types import EyasError

STUB = """
import http.server, json, os, pathlib, sys

folder = pathlib.Path(sys.argv[0]).parent
(folder / "arguments").write_text(" ".join(sys.argv[1:]))
(folder / "pid").write_text(str(os.getpid()))
if "--fails" in sys.argv:
    sys.exit("error: it cannot be")
polls = iter(range(10**6))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        done = next(polls)
        progress = {"step": "loading target", "done": done, "total": 2}
        body = json.dumps({"progress": progress} if done < 3 else {}).encode()
        self.send_response(200 if done >= 3 else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stub.py").write_text(STUB)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/stub.py "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(server_process.sys, "executable", str(python))
    return tmp_path


def is_alive(folder: Path) -> bool:
    return Path(f"/proc/{(folder / 'pid').read_text()}").exists()


def test_a_server_runs_while_it_is_used(stub: Path) -> None:
    told: list[tuple[str, int, int]] = []
    with running_server("m", ["--topk", "2"], progress=lambda *step: told.append(step)) as url:
        arguments = (stub / "arguments").read_text()
        assert arguments == f"-m eyas serve m --topk 2 --port {url.rpartition(':')[2]}"
        assert is_alive(stub)
    assert not is_alive(stub)
    assert [done for _, done, _ in told] == [0, 1, 2]


def test_a_failure_inside_ends_it_too(stub: Path) -> None:
    with pytest.raises(ZeroDivisionError), running_server("m", []):
        raise ZeroDivisionError
    assert not is_alive(stub)


def test_why_it_does_not_start(stub: Path) -> None:
    started = time.monotonic()
    with (
        pytest.raises(EyasError, match=r"did not start:\nerror: it cannot be"),
        running_server("m", ["--fails"]),
    ):
        pass
    assert time.monotonic() - started < 30
