"""Conversations packed into batches of one size, and the rows of a batch that the loss reads.

A batch is a flat run of whole documents; nothing is padded but its end. Everything here is host
arithmetic on whole numbers, so that a training step never waits for the device to learn a shape
or a count.

Shape suffixes: T rows of a batch, S draft steps, U rows that the loss reads.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.train.causal_cores import Documents
from eyas.types import EyasError

Ints = npt.NDArray[np.int64]

PAD_MULTIPLE = 64  # batches end on multiples of this many rows, so that shapes repeat


class Record(Protocol):
    """One tokenized conversation. loss_mask: 1 on the tokens of answers, end of turn included."""

    @property
    def input_ids(self) -> Sequence[int]:
        """Token ids."""

    @property
    def loss_mask(self) -> Sequence[int]:
        """0 or 1 for each token."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """All conversations in three flat arrays.

    tokens: int32. turns: int32, 0 outside answers, else a number of its own for each answer of
    each conversation. ends: int64, where each conversation ends. num_dropped: conversations
    without any trainable row; num_cut: those longer than max_length, of which the start is kept.
    """

    tokens: npt.NDArray[np.int32]
    turns: npt.NDArray[np.int32]
    ends: Ints
    num_dropped: int = 0
    num_cut: int = 0

    @classmethod
    def read(cls, records: Iterable[Record], *, max_length: int) -> Corpus:
        """Gather records. Raises EyasError when none has a row to train on."""
        tokens, turns, ends = [], [], []
        num_turns = num_dropped = num_cut = end = 0
        for record in records:
            ids = np.asarray(record.input_ids, np.int32)[:max_length]
            mask = np.array(record.loss_mask, np.int32)[:max_length]
            mask[:1] = 0  # no state of the target comes before the first token
            num_cut += len(record.input_ids) > max_length
            starts = np.diff(mask, prepend=0) == 1
            turn = np.where(mask == 1, np.cumsum(starts, dtype=np.int32) + num_turns, 0)
            if not _loss_rows(turn).size:
                num_dropped += 1
                continue
            num_turns += int(starts.sum())
            end += len(ids)
            tokens.append(ids)
            turns.append(turn.astype(np.int32))
            ends.append(end)
        if not tokens:
            raise EyasError(
                f"none of the {num_dropped} conversations has two answer tokens in a row within "
                f"the first {max_length} tokens: there is nothing to train on; look at loss_mask"
            )
        return cls(
            np.concatenate(tokens),
            np.concatenate(turns),
            np.asarray(ends, np.int64),
            num_dropped,
            num_cut,
        )

    def __len__(self) -> int:
        """Number of conversations."""
        return len(self.ends)

    @property
    def lengths(self) -> Ints:
        """Tokens of each conversation."""
        return np.diff(self.ends, prepend=0)

    def loss_counts(self, num_steps: int) -> Ints:
        """[conversations, steps]: LossRows.num_S of each conversation alone.

        An answer of n tokens has n - 1 - k rows for step k.
        """
        turn_sizes = np.bincount(self.turns)[1:]
        first_of_turn = np.unique(self.turns[self.turns > 0], return_index=True)[1]
        token_index = np.flatnonzero(self.turns > 0)[first_of_turn]
        owner = np.searchsorted(self.ends, token_index, side="right")
        counts = np.zeros((len(self), num_steps), np.int64)
        present_sizes = turn_sizes[turn_sizes > 0]
        for step in range(num_steps):
            np.add.at(counts[:, step], owner, np.maximum(present_sizes - 1 - step, 0))
        return counts

    def fingerprint(self) -> str:
        """A digest of all that is trained on."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.turns, self.ends):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def _loss_rows(turn_T: npt.NDArray[np.int32]) -> Ints:
    """Rows u whose next token is predicted: u and u + 1 lie in one answer."""
    return np.flatnonzero((turn_T[:-1] != 0) & (turn_T[:-1] == turn_T[1:]))


@dataclasses.dataclass(frozen=True)
class LossRows:
    """What the loss reads of a batch.

    row_U: int64, rows u of the target whose distribution is taught (it predicts token u + 1).
    valid_SU: whether step k trains on it, from the base row u - 1 - k: the tokens which the chain
    reads on its way (u - k to u) and the one which it predicts (u + 1) lie in the same answer. The
    base row itself need not: the first draft after a prompt is trained.
    """

    row_U: Tensor
    valid_SU: Tensor


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed documents on a device. token_T holds num_steps + 1 zeros past its T rows, so that
    shifted views need no case of their own. num_tokens: rows without the padding at the end."""

    token_T: Tensor
    position_T: Tensor
    documents: Documents
    loss_rows: LossRows
    num_tokens: int

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.position_T)

    def shifted(self, step: int) -> Tensor:
        """x_{t+1+step} of each row t (what lies past a document's end is never in the loss)."""
        return self.token_T[1 + step : 1 + step + self.num_rows]


def find_loss_rows(
    turn_T: npt.NDArray[np.int32], num_steps: int
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """(row_U, valid_SU) of a batch from its answers' numbers."""
    row_U = _loss_rows(turn_T)
    valid = [turn_T[np.maximum(row_U - step, 0)] == turn_T[row_U] for step in range(num_steps)]
    return row_U, np.stack(valid)


def make_batch(
    corpus: Corpus,
    members: Sequence[int],
    *,
    num_steps: int,
    device: torch.device | str,
    pad_to: int = PAD_MULTIPLE,
) -> Batch:
    """Pack these conversations for `num_steps` draft steps; the copy to a GPU is asynchronous."""
    spans = [(int(corpus.ends[i] - corpus.lengths[i]), int(corpus.ends[i])) for i in members]
    lengths = [end - start for start, end in spans]
    num_tokens = sum(lengths)
    num_padding = -num_tokens % pad_to
    if num_padding:
        lengths.append(num_padding)  # a document of zeros that nothing is trained on
    token_T = np.zeros(num_tokens + num_padding + num_steps + 1, np.int64)
    token_T[:num_tokens] = np.concatenate([corpus.tokens[start:end] for start, end in spans])
    turn_T = np.zeros(num_tokens + num_padding, np.int32)
    turn_T[:num_tokens] = np.concatenate([corpus.turns[start:end] for start, end in spans])
    position_T = np.concatenate([np.arange(length) for length in lengths])
    row_U, valid_SU = find_loss_rows(turn_T, num_steps)
    loss_rows = LossRows(_to_device(row_U, device), _to_device(valid_SU, device))
    return Batch(
        _to_device(token_T, device),
        _to_device(position_T, device),
        Documents.of(lengths, device),
        loss_rows,
        num_tokens,
    )


def _to_device(array: npt.NDArray[np.generic], device: torch.device | str) -> Tensor:
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def plan_batches(
    lengths: Ints, *, tokens_per_batch: int, seed: int
) -> Iterator[tuple[int, list[int]]]:
    """(epoch, members) of one batch after the other, for ever.

    Each epoch is a new order, a function of seed and epoch alone; a batch takes conversations in
    that order as long as they fit, and may take the first ones of the next epoch. The epoch given
    is that of the last member.
    """
    members: list[int] = []
    size = 0
    epoch = 0
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(len(lengths))
        for index in order.tolist():
            length = int(lengths[index])
            if members and size + length > tokens_per_batch:
                yield epoch, members
                members, size = [], 0
            members.append(index)
            size += length
        epoch += 1


def count_batches(lengths: Ints, *, tokens_per_batch: int, seed: int, num_epochs: float) -> int:
    """Batches until `num_epochs` times the corpus has been read (at least one)."""
    wanted = num_epochs * float(lengths.sum())
    seen, count = 0.0, 0
    for _, members in plan_batches(lengths, tokens_per_batch=tokens_per_batch, seed=seed):
        seen += float(lengths[members].sum())
        count += 1
        if seen >= wanted * (1 - 1e-9):
            break
    return count
