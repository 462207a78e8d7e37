"""Which of the target's tokens a draft can propose: the frequent ones, and all special ones.

Shape suffixes: D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.train.packing import Record
from eyas.types import EyasError


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """kept_D: int64 target ids, ascending. coverage: share of the answers' tokens that are kept.
    num_seen: distinct tokens in the answers; num_filled: kept ids that occur nowhere in them."""

    kept_D: Tensor
    coverage: float
    num_seen: int
    num_filled: int


def count_tokens(records: Iterable[Record], vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each target id occurs in answers (loss_mask 1), [V].

    Raises EyasError for an id outside the vocabulary and when no token is in an answer.
    """
    counts = np.zeros(vocab_size, np.int64)
    for record in records:
        ids, mask = np.asarray(record.input_ids), np.asarray(record.loss_mask)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise EyasError(
                f"a conversation has the token id {ids.max() if ids.min() >= 0 else ids.min()}, "
                f"outside this target's vocabulary of {vocab_size}: it was tokenized for another"
            )
        counts += np.bincount(ids[mask == 1], minlength=vocab_size)
    if not counts.any():
        raise EyasError("no conversation has an answer token (loss_mask is 0 everywhere)")
    return counts


def choose_vocabulary(
    counts: npt.NDArray[np.int64], size: int, *, required_ids: Iterable[int] = ()
) -> Vocabulary:
    """Keep required_ids (special and end tokens) and the most frequent others, `size` in all.

    Of equally frequent ids the lower one is kept, and when the answers have fewer distinct tokens
    than asked for, the lowest unseen ids fill up: tokenizers number merges by how common they are.
    Raises EyasError when size does not fit.
    """
    vocab_size = len(counts)
    required = np.unique(np.fromiter(required_ids, np.int64))
    if not 1 <= size <= vocab_size:
        raise EyasError(
            f"a draft vocabulary of {size} tokens was asked for; the target has {vocab_size}: "
            f"choose between 1 and {vocab_size}"
        )
    if required.size > size:
        raise EyasError(
            f"{required.size} special tokens must be kept, more than the {size} of the draft "
            "vocabulary that was asked for: enlarge it"
        )
    if required.size and not 0 <= required[0] <= required[-1] < vocab_size:
        raise EyasError(
            f"special token ids {required[0]} to {required[-1]} do not lie in a vocabulary of "
            f"{vocab_size}"
        )
    rank = counts.copy()
    rank[required] = np.iinfo(np.int64).max
    kept = np.sort(np.argsort(-rank, kind="stable")[:size])
    return Vocabulary(
        torch.from_numpy(kept.astype(np.int64)),
        float(counts[kept].sum() / counts.sum()),
        int((counts > 0).sum()),
        int((counts[kept] == 0).sum()),
    )


def vocabulary_maps(kept_D: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(d2t int64 [D], t2d bool [V]) of ascending kept ids: target id = draft id + d2t."""
    d2t_D = kept_D - torch.arange(len(kept_D))
    t2d_V = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, kept_D, True)
    return d2t_D, t2d_V
