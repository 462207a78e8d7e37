"""A server process of its own for the measurements in this folder."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def running_server(model: Path, *flags: str, log: Path | None = None) -> Iterator[tuple[str, int]]:
    """(URL, process id) of a ready server on a free port of this host. log: where it logs to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "eyas", "serve", str(model), "--port", str(port)]
    command += ["--served-model-name", "random", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (log or Path(os.devnull)).open("wb") as output:
        process = subprocess.Popen(command, stderr=output, env=environment)
    try:
        while not _is_ready(url):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with exit code {process.returncode}")
            time.sleep(0.1)
        yield url, process.pid
        process.send_signal(signal.SIGTERM)
        if (code := process.wait(60)) != 0:
            raise SystemExit(f"the server ended with exit code {code}")
    finally:
        process.kill()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10):
            return True
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def resident_mib(pid: int) -> float:
    """Resident memory of a process and its children."""
    total = 0.0
    for folder in _family(pid):
        with contextlib.suppress(OSError):
            total += int((folder / "statm").read_text().split()[1]) * 4096 / 2**20
    return total


def cpu_seconds(pid: int) -> float:
    """What a process and its children have computed: time in which neighbours do not count."""
    ticks = 0
    for folder in _family(pid):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])  # user, system
    return ticks / os.sysconf("SC_CLK_TCK")


def _family(pid: int) -> list[Path]:
    folders = [Path(f"/proc/{pid}")]
    for folder in folders:
        with contextlib.suppress(OSError):
            for thread in (folder / "task").iterdir():
                children = (thread / "children").read_text().split()
                folders += [Path(f"/proc/{child}") for child in children]
    return folders
