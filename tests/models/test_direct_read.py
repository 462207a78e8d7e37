"""Threads that read files into tensors."""

import os
import threading
from pathlib import Path

import pytest
import torch

from eyas.models import direct_read
from eyas.models.checkpoint import CheckpointError
from eyas.models.direct_read import ReadJob, read_directly

NUM_FILES, SIZE = 3, 5000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(direct_read.PIECE_BYTES, "cpu", 1024)


def write_files(folder: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    values = [torch.arange(SIZE).remainder(97).add(n).to(dtype) for n in range(NUM_FILES)]
    for number, value in enumerate(values):
        stored = value.view(torch.uint8).numpy().tobytes()
        (folder / f"{number}").write_bytes(b"head" + stored + b"tail")
    return values


def jobs(folder: Path, stored: torch.dtype, wanted: torch.dtype) -> list[ReadJob]:
    return [
        ReadJob(
            name=f"tensor {number}",
            file=folder / f"{number}",
            offset=4,
            num_bytes=SIZE * stored.itemsize,
            dtype=stored,
            destination=torch.zeros(SIZE // 10, 10, dtype=wanted),
        )
        for number in range(NUM_FILES)
    ]


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float64, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.int32, torch.int64),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
    ],
)
def test_bytes_arrive(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, num_threads: int
) -> None:
    values, todo = write_files(tmp_path, stored), jobs(tmp_path, stored, wanted)
    told: dict[str, int] = {}

    def on_read(name: str, num_bytes: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        told[name] = told.get(name, 0) + num_bytes

    read_directly(todo, on_read=on_read, num_threads=num_threads)
    assert told == {job.name: job.num_bytes for job in todo}
    for job, value in zip(todo, values, strict=True):
        expected = value.to(wanted).view(torch.uint8)
        assert torch.equal(job.destination.view(-1).view(torch.uint8), expected)


def test_rows_of_a_larger_tensor(tmp_path: Path) -> None:
    values = write_files(tmp_path, torch.float32)
    whole = torch.full((NUM_FILES + 1, SIZE), -1.0)
    todo = [
        ReadJob(f"{n}", tmp_path / f"{n}", 4, SIZE * 4, torch.float32, whole[n])
        for n in range(NUM_FILES)
    ]
    read_directly(todo, on_read=lambda name, count: None)
    assert torch.equal(whole[:-1], torch.stack(values)) and (whole[-1] == -1).all()


def test_tensors_of_inference_mode(tmp_path: Path) -> None:
    values = write_files(tmp_path, torch.float32)
    with torch.inference_mode():
        todo = jobs(tmp_path, torch.float32, torch.float64)
        read_directly(todo, on_read=lambda name, count: None)
    assert torch.equal(todo[2].destination.view(-1), values[2].double())


def test_nothing_to_do(tmp_path: Path) -> None:
    read_directly([], on_read=lambda name, count: None)
    empty = ReadJob("e", Path(__file__), 0, 0, torch.float32, torch.zeros(0))
    read_directly([empty], on_read=lambda name, count: None)


def test_errors_reach_the_caller_and_end_all_threads(tmp_path: Path) -> None:
    write_files(tmp_path, torch.float32)
    todo = jobs(tmp_path, torch.float32, torch.float32)
    with (tmp_path / "1").open("r+b") as file:
        file.truncate(3000)
    before, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match="1 ended while tensor 1 was read"):
        read_directly(todo, on_read=lambda name, count: None, num_threads=3)
    (tmp_path / "2").unlink()
    with pytest.raises(CheckpointError, match="2 cannot be read"):
        read_directly(todo, on_read=lambda name, count: None)
    assert threading.active_count() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_caller_that_raises_ends_the_threads(tmp_path: Path) -> None:
    write_files(tmp_path, torch.float32)
    before = threading.active_count()

    def on_read(name: str, num_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_directly(jobs(tmp_path, torch.float32, torch.float32), on_read=on_read)
    assert threading.active_count() == before


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    todo = jobs(tmp_path / "no", torch.float32, torch.float32)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_directly(todo, on_read=lambda name, count: None)
