"""A server of its own for a benchmark."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import httpx

from eyas.models.embedded import Progress
from eyas.types import EyasError

_STOP_SECONDS = 30.0
_LOG_LINES = 8  # of a failed start


@contextlib.contextmanager
def running_server(
    model: str, flags: Sequence[str], *, progress: Progress | None = None
) -> Iterator[str]:
    """`eyas serve MODEL FLAGS` on a free port of this host, from when it is ready; its URL.

    progress: told how far the load is. Raises EyasError, with the last lines of the log, when the
    server ends by itself.
    """
    port = _free_port()
    command = [sys.executable, "-m", "eyas", "serve", model, *flags, "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            while not _is_ready(url, progress):
                if process.poll() is not None:
                    log.seek(0)
                    tail = "".join(log.readlines()[-_LOG_LINES:])
                    raise EyasError(f"the server did not start:\n{tail.rstrip()}")
                time.sleep(0.1)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _is_ready(url: str, progress: Progress | None) -> bool:
    try:
        response = httpx.get(f"{url}/ready", timeout=10, trust_env=False)
        told = response.json().get("progress")
    except (httpx.HTTPError, ValueError):
        return False
    if told and progress is not None and told["total"]:
        progress(told["step"], told["done"], told["total"])
    return response.status_code == 200
