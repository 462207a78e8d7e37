"""Compile the C kernels with the machine's C compiler at first use, and load them.

The library lies in Eyas' cache under a hash of everything that it depends on. Whatever fails (no
compiler, a compile error, a read-only cache) leaves the torch reference in charge and a text that
says so; nothing is raised.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

_FOLDER = Path(__file__).parent
SOURCES = tuple(_FOLDER / f"{name}.c" for name in ("native", "native_draft", "native_round"))
_HEADERS = (_FOLDER / "native.h",)
SWITCH = "EYAS_NATIVE"
_COMPILERS = ("cc", "gcc", "clang")
# No fast-math: NaN and infinity matter. No OpenMP: a second runtime would spin against torch's.
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
_TUNED = ("-march=native", "-ffp-contract=fast", "-Wno-psabi")
_X86 = ("-mprefer-vector-width=512",)
_COMPILE_SECONDS = 120
_DIGEST_SIZE = hashlib.sha256().digest_size


class NativeLibrary:
    """The library, or why there is none. Loaded once, at the first `get`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._library: ctypes.PyDLL | None = None
        self._status: str | None = None

    def get(self) -> ctypes.PyDLL | None:
        """The loaded library, or None; builds it on the first call (seconds, if not cached)."""
        with self._lock:
            if self._status is None:
                try:
                    self._library, self._status = _load()
                except (OSError, subprocess.SubprocessError, _UnavailableError) as error:
                    self._status = f"torch reference ({_one_line(error)})"
        return self._library

    @property
    def status(self) -> str:
        """One line on what runs; "not loaded yet" before the first use."""
        return self._status or "not loaded yet"


class _UnavailableError(Exception):
    """There can be no native library here."""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def cache_folder() -> Path:
    """Where libraries are kept, in Eyas' cache: $EYAS_CACHE, else $XDG_CACHE_HOME/eyas, else
    ~/.cache/eyas."""
    if own := os.environ.get("EYAS_CACHE"):
        return Path(own).expanduser() / "native"
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(general).expanduser() / "eyas" / "native"


def _load() -> tuple[ctypes.PyDLL, str]:
    if os.environ.get(SWITCH, "1") == "0":
        raise _UnavailableError(f"{SWITCH}=0")
    compiler = _compiler()
    flags = [*_FLAGS, *_TUNED, *(_X86 if platform.machine() in ("x86_64", "AMD64") else ())]
    version = _run([compiler, "--version"])
    sources = [path.read_bytes() for path in (*SOURCES, *_HEADERS)]
    parts = (*sources, version.encode(), repr(flags).encode(), _cpu().encode())
    key = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts))
    path = cache_folder() / f"{key.hexdigest()[:32]}.so"
    if not _is_whole(path):
        _build(compiler, flags, path)
    # PyDLL keeps the interpreter lock: a call is microseconds, and letting go costs as much.
    return ctypes.PyDLL(str(path)), f"native C kernels ({version.splitlines()[0]})"


def _compiler() -> str:
    named = os.environ.get("CC", "").split()[:1]
    for name in (*named, *_COMPILERS):
        if found := shutil.which(name):
            return found
    raise _UnavailableError("no C compiler found")


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_SECONDS
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        why = next((line for line in lines if "error" in line), lines[-1] if lines else "")
        raise _UnavailableError(f"{command[0]} failed: {why}")
    return done.stdout.strip() or command[0]


def _cpu() -> str:
    """What -march=native depends on: a cache may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = [platform.processor()]
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU")
    return "\n".join((platform.machine(), *(x for x in lines if x.startswith(names))))


def _is_whole(path: Path) -> bool:
    """Whether a library is there and as it was built: loading a damaged one may kill the process.

    The file ends with the digest of what comes before, which a loader does not look at.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-_DIGEST_SIZE]).digest() == data[-_DIGEST_SIZE:]


def _build(compiler: str, flags: list[str], path: Path) -> None:
    """Compile to a temporary name and rename: two processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "native.so"
        _run([compiler, *flags, "-o", str(made), *map(str, SOURCES), "-lm"])
        data = made.read_bytes()
        with made.open("ab") as file:
            file.write(hashlib.sha256(data).digest())
        made.replace(path)
