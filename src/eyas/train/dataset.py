"""Conversations ready for training, as a folder of `*.jsonl.gz` shards.

One conversation a line: {"input_ids": [...], "loss_mask": [...], "source": "..."}; loss_mask is 1
on the tokens that the target itself would generate (the end of the turn included), else 0.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from eyas.types import EyasError

SHARD_SUFFIX = ".jsonl.gz"


class DatasetError(EyasError):
    """A dataset that is missing, broken, or would teach nothing; the text says where."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One conversation. Raises DatasetError for a mask that does not fit or marks nothing."""

    input_ids: list[int]
    loss_mask: list[int]
    source: str = ""

    def __post_init__(self) -> None:
        if len(self.input_ids) != len(self.loss_mask):
            raise DatasetError(
                f"{len(self.input_ids)} input_ids come with {len(self.loss_mask)} loss_mask values"
            )
        if not set(self.loss_mask) <= {0, 1}:
            raise DatasetError("loss_mask has values other than 0 and 1")
        if 1 not in self.loss_mask:
            raise DatasetError(
                "loss_mask is 0 everywhere: the conversation has no answer to learn from"
            )

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that count in the loss."""
        return sum(self.loss_mask)


def write_shard(path: Path, rows: Iterable[Row]) -> int:
    """Write rows to a shard; it appears under its name complete or not at all. Returns the number.

    The bytes depend on the rows alone. The folder is made if need be.
    """
    assert path.name.endswith(SHARD_SUFFIX), path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    num_rows = 0
    try:
        with (
            unfinished.open("wb") as raw,
            # No name and no time in the header: equal rows make equal files.
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=6, mtime=0) as packed,
        ):
            for row in rows:
                line = json.dumps(dataclasses.asdict(row), separators=(",", ":"))
                packed.write(line.encode() + b"\n")
                num_rows += 1
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return num_rows


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a dataset, in order. Raises DatasetError when there are none."""
    paths = sorted(p for p in folder.glob(f"*{SHARD_SUFFIX}") if not p.name.startswith("."))
    if not paths:
        raise DatasetError(f"{folder} has no {SHARD_SUFFIX} shards: run the stage regenerate first")
    return paths


def read_rows(folder: Path) -> Iterator[Row]:
    """All conversations of a dataset, in order.

    Raises DatasetError with file and line for what is not a conversation.
    """
    for path in shard_paths(folder):
        yield from read_shard(path)


def read_shard(path: Path) -> Iterator[Row]:
    """The conversations of one shard; errors as in read_rows."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                yield _row(line, f"{path}:{number}")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error


def _row(line: str, where: str) -> Row:
    try:
        data = json.loads(line)
        input_ids, loss_mask = data["input_ids"], data["loss_mask"]
        source = data.get("source", "")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DatasetError(
            f'{where} is no conversation: it needs "input_ids" and "loss_mask"'
        ) from error
    lists = isinstance(input_ids, list) and isinstance(loss_mask, list)
    if not lists or not all(type(t) is int and t >= 0 for t in input_ids):
        raise DatasetError(
            f"{where}: input_ids and loss_mask must be lists of token ids and of 0/1"
        )
    try:
        return Row(input_ids, loss_mask, str(source))
    except DatasetError as error:
        raise DatasetError(f"{where}: {error}") from None
