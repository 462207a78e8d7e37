"""Suites that run on the CPU in every test run, once more with the engine on the GPU.

Greedy and seeded equality, acceptance against a slow replay, a perfect draft's and a null draft's,
the caches after each round, and the joint law of sampled tokens: with rounds run one by one, and
replayed as CUDA graphs.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SUITES = {
    "equality": ["engine/test_round.py"],
    "acceptance": ["engine/test_acceptance.py"],
    "caches": ["engine/test_draft_kv.py", "engine/test_prefix_cache.py"],
    "options": ["engine/test_sampling_options.py"],
}


def run(files: list[str], **variables: str) -> None:
    """The suite in a process of its own, as the device is chosen when it is imported."""
    environment = {**os.environ, "EYAS_TEST_DEVICE": "cuda", **variables}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "8", "-p", "no:benchmark"]  # pytest-benchmark warns beside xdist
    ran = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout


@pytest.mark.parametrize("cuda_graphs", ["0", "1"], ids=["eager", "graphs"])
@pytest.mark.parametrize("suite", list(SUITES))
def test_the_engine_on_the_gpu_passes(suite: str, cuda_graphs: str) -> None:
    run(SUITES[suite], EYAS_TEST_CUDA_GRAPHS=cuda_graphs)


def test_the_joint_law_of_sampled_tokens() -> None:
    run(["speculative/test_joint_law.py"])
