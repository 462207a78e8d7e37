"""Fuzz a server of a random model from its own OpenAPI document; any 5xx fails (exit code 1).

Needs the dev extra (schemathesis).

    python scripts/fuzz_server.py [--seconds 300]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

from random_model import write_random_model
from server_under_test import running_server


def main() -> int:
    """Run round after round of requests, each with another seed, until the time is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300)
    arguments = parser.parse_args()
    command = shutil.which("schemathesis")
    if command is None:
        raise SystemExit("schemathesis is not installed: pip install -e .[dev]")
    deadline = time.monotonic() + arguments.seconds
    num_rounds = 0
    with tempfile.TemporaryDirectory() as folder:
        model, log = write_random_model(Path(folder)), Path(folder) / "log"
        settings = ("--max-model-len=48", "--max-batch-size=16", "--log-format=json")
        with running_server(model, *settings, log=log) as (url, _):
            while (left := deadline - time.monotonic()) > 5:
                flags = ["--checks=not_a_server_error", "--max-examples=100", "--workers=4"]
                flags += ["--phases=examples,coverage,fuzzing", f"--seed={num_rounds}"]
                flags += [f"--max-time={int(left)}", "--request-timeout=120"]
                # Its exit code tells of trouble of its own, too: the server's log is the judge.
                subprocess.run(
                    [command, "run", f"{url}/openapi.json", *flags],
                    env=os.environ | {"NO_COLOR": "1"},
                    cwd=folder,
                )
                num_rounds += 1
            with urllib.request.urlopen(f"{url}/health", timeout=30) as response:
                print(f"{num_rounds} rounds; health: {json.load(response)}")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    by_status = Counter(line["status"] for line in lines if "status" in line)
    wrong = [line for line in lines if line.get("status", 0) >= 500 or "traceback" in line]
    print(f"answers by status: {dict(by_status)}", *wrong, sep="\n")
    return 1 if wrong or not by_status[200] else 0


if __name__ == "__main__":
    raise SystemExit(main())
