"""How long `eyas serve` takes from its command line to /ready, stage by stage.

    python scripts/bench_startup.py FOLDER [--shape llama-3.1-8b] [--runs 2] [--max-batch-size 64]
                                    [--load-only]

Writes a random checkpoint into FOLDER if there is none (random_checkpoint.py), starts the server
once "cold" (the weight files dropped from the system's memory, empty caches of compiled kernels)
and then warm, each time in new processes, and prints the stages that the server's log names. The
time of each run counts from the start of the process, imports included. --load-only (the default
where FastAPI and uvicorn are missing) starts the engine as the server does, without HTTP.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from server_under_test import running_server

MODEL_LEN = 4096
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


# What the server's engine process does; settings as JSON are its argument.
_LOAD = """
import json, sys
from eyas.config import EngineConfig
from eyas.engine.serving_load import load_for_serving
_, loaded = load_for_serving(EngineConfig(**json.loads(sys.argv[1])), lambda *step: None)
print(*loaded.facts, sep="\\n", flush=True)
"""


def one_load(target: Path, draft: Path, batch: int) -> tuple[float, list[str]]:
    """As one_start, of the engine alone."""
    settings = {"model": str(target), "draft": str(draft), "max_batch_size": batch}
    settings["max_model_len"] = MODEL_LEN
    log = "import logging; logging.basicConfig(level=20)"
    command = [sys.executable, "-c", log + _LOAD, json.dumps(settings)]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        output, errors = process.communicate()
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(errors.decode()[-4000:])
    return seconds, [*_RATE.findall(errors.decode()), *_STAGES.findall(output.decode())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--load-only", action="store_true")
    given, flags = parser.parse_known_args()
    has_server = all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn"))
    is_load_only = given.load_only or not has_server
    target, draft = given.folder / "target", given.folder / "draft"
    if not draft.is_dir():
        script = Path(__file__).parent / "random_checkpoint.py"
        subprocess.run(
            [sys.executable, str(script), str(given.folder), "--shape", given.shape], check=True
        )
    caches = given.folder / "caches"
    shutil.rmtree(caches, ignore_errors=True)
    os.environ |= {"TRITON_CACHE_DIR": str(caches / "triton"), "EYAS_CACHE": str(caches / "eyas")}
    batch = given.max_batch_size
    flags = ["--max-batch-size", str(batch), "--max-model-len", str(MODEL_LEN), *flags]
    drop_from_memory(given.folder)
    for run in range(given.runs + 1):
        if run == 1:
            print(f"all files read once: {read_into_memory(given.folder):.2f} GB/s, one thread")
        if is_load_only:
            seconds, lines = one_load(target, draft, batch)
        else:
            seconds, lines = one_start(target, draft, flags)
        what = "engine up and process gone" if is_load_only else "ready"
        print(f"{'warm' if run else 'cold'}: {what} after {seconds:.1f} s")
        for line in lines:
            print(f"    {line}")


if __name__ == "__main__":
    main()
