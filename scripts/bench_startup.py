"""How long `eyas serve` takes from its command line to /ready, stage by stage.

    python scripts/bench_startup.py FOLDER [--shape llama-3.1-8b] [--runs 2] [--max-batch-size 64]

Writes a random checkpoint into FOLDER if there is none (random_checkpoint.py), starts the server
once "cold" (the weight files dropped from the system's memory, empty caches of compiled kernels)
and then warm, each time in new processes, and prints the stages that the server's log names. The
time of each run counts from the start of the process, imports included.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from server_under_test import running_server

_STAGES = re.compile(r"import [\d.]+ s.* in all")
_RATE = re.compile(r"loading \w+: [\d.]+ GB in [\d.]+ s, [\d.]+ GB/s")


def drop_from_memory(folder: Path) -> None:
    """Ask the system to forget the files' contents; it does so for what has reached the disk."""
    for file in sorted(folder.rglob("*.safetensors")):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_into_memory(folder: Path) -> float:
    """Read all weight files once; GB a second."""
    start, size = time.perf_counter(), 0
    buffer = bytearray(16 << 20)
    for file in sorted(folder.rglob("*.safetensors")):
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                size += count
    return size / 1e9 / (time.perf_counter() - start)


def one_start(target: Path, draft: Path, flags: list[str]) -> tuple[float, list[str]]:
    """(seconds from the command to /ready, what the log says of stages and rates)."""
    with tempfile.NamedTemporaryFile(suffix=".log") as file:
        log = Path(file.name)
        start = time.perf_counter()
        try:
            with running_server(target, "--draft", str(draft), *flags, log=log):
                seconds = time.perf_counter() - start
        except SystemExit:
            print(log.read_text()[-4000:], file=sys.stderr)
            raise
        text = log.read_text()
    return seconds, [*_RATE.findall(text), *_STAGES.findall(text)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--max-batch-size", type=int, default=64)
    given, flags = parser.parse_known_args()
    target, draft = given.folder / "target", given.folder / "draft"
    if not draft.is_dir():
        script = Path(__file__).parent / "random_checkpoint.py"
        subprocess.run(
            [sys.executable, str(script), str(given.folder), "--shape", given.shape], check=True
        )
    caches = given.folder / "caches"
    shutil.rmtree(caches, ignore_errors=True)
    os.environ |= {"TRITON_CACHE_DIR": str(caches / "triton"), "EYAS_CACHE": str(caches / "eyas")}
    flags = ["--max-batch-size", str(given.max_batch_size), "--max-model-len", "4096", *flags]
    drop_from_memory(given.folder)
    for run in range(given.runs + 1):
        if run == 1:
            print(f"all files read once: {read_into_memory(given.folder):.2f} GB/s, one thread")
        seconds, lines = one_start(target, draft, flags)
        print(f"{'warm' if run else 'cold'}: ready after {seconds:.1f} s")
        for line in lines:
            print(f"    {line}")


if __name__ == "__main__":
    main()
