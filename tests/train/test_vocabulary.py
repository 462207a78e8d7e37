"""Which tokens a draft keeps, and its maps."""

import numpy as np
import pytest
import torch
from fixtures.training import Talk

from eyas.models.vocab_map import map_findings
from eyas.train.vocabulary import choose_vocabulary, count_tokens, vocabulary_maps
from eyas.types import EyasError


def test_only_answers_count() -> None:
    talks = [Talk([1, 2, 3, 3], [0, 0, 1, 1]), Talk([3, 2, 5], [0, 1, 1])]
    assert count_tokens(talks, 8).tolist() == [0, 0, 1, 2, 0, 1, 0, 0]


def test_ids_of_another_tokenizer_are_refused() -> None:
    with pytest.raises(EyasError, match="token id 8"):
        count_tokens([Talk([1, 8], [0, 1])], 8)
    with pytest.raises(EyasError, match="token id -1"):
        count_tokens([Talk([1, -1], [0, 1])], 8)
    with pytest.raises(EyasError, match="loss_mask"):
        count_tokens([Talk([1, 2], [0, 0])], 8)


def test_most_frequent_and_required() -> None:
    counts = np.array([0, 9, 1, 5, 5, 0, 7, 0])
    vocabulary = choose_vocabulary(counts, 4, required_ids=[5, 5, 0])
    assert vocabulary.kept_D.tolist() == [0, 1, 5, 6]
    assert vocabulary.kept_D.dtype == torch.int64
    assert vocabulary.coverage == pytest.approx(16 / 27)
    assert (vocabulary.num_seen, vocabulary.num_filled) == (5, 2)
    # Of two equally frequent ones the lower id.
    assert choose_vocabulary(counts, 3).kept_D.tolist() == [1, 3, 6]


def test_fewer_distinct_tokens_than_asked_for() -> None:
    """A corpus of 40 tokens and a draft vocabulary of 64 still give a valid map."""
    counts = np.zeros(500, np.int64)
    counts[np.arange(100, 180, 2)] = 3
    vocabulary = choose_vocabulary(counts, 64, required_ids=[499])
    d2t_D, t2d_V = vocabulary_maps(vocabulary.kept_D, 500)
    assert int(t2d_V.sum()) == 64 == len(d2t_D) and vocabulary.coverage == 1.0
    assert vocabulary.num_filled == 24 and t2d_V[499]
    ids = torch.arange(64) + d2t_D
    assert 0 <= int(ids.min()) and int(ids.max()) < 500
    assert torch.equal(ids, t2d_V.nonzero().flatten())
    assert not map_findings(d2t_D, t2d_V, target_vocab_size=500)


def test_sizes_that_do_not_fit() -> None:
    counts = np.ones(10, np.int64)
    with pytest.raises(EyasError, match="between 1 and 10"):
        choose_vocabulary(counts, 11)
    with pytest.raises(EyasError, match="3 special tokens"):
        choose_vocabulary(counts, 2, required_ids=[1, 2, 3])
    with pytest.raises(EyasError, match="do not lie"):
        choose_vocabulary(counts, 2, required_ids=[10])
    assert choose_vocabulary(counts, 10).kept_D.tolist() == list(range(10))
