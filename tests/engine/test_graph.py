"""Which rounds share a graph; that replays are right is tests/gpu's to say."""

from typing import Any, cast

import pytest
import torch

from eyas.config import PLAIN, TreeShape
from eyas.engine.graph import GraphKey, RoundGraphs, batch_sizes, padded_length
from eyas.kernels import SamplingMode

GREEDY, SAMPLED = SamplingMode(), SamplingMode(noise=True)
CHAIN = TreeShape(3, 1, 4)


def make(monkeypatch: pytest.MonkeyPatch, **options: Any) -> RoundGraphs:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    return RoundGraphs(cast(Any, None), num_slots=6, max_kv_len=3000, **options)


def key(graphs: RoundGraphs, count: int = 3, length: int = 10, **options: Any) -> GraphKey:
    return graphs.key(count, CHAIN, max_kv_len=length, **({"mode": GREEDY} | options))


def test_batches_are_padded_to_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = make(monkeypatch)
    assert [key(graphs, count).num_requests for count in (1, 2, 3, 5, 6)] == [1, 2, 4, 6, 6]
    assert batch_sizes(6) == [1, 2, 4, 6]


def test_lengths_count_only_where_attention_asks_for_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounded = make(monkeypatch)
    assert key(bounded).max_kv_len == 256 == padded_length(1, 3000)
    assert key(bounded, length=257).max_kv_len == 512
    assert key(bounded, length=2900).max_kv_len == 3000  # never past the page tables
    any_length = make(monkeypatch, any_length=True)
    assert key(any_length) == key(any_length, length=2900)
    assert key(any_length).max_kv_len == 3000


def test_sampled_requests_need_no_graph_of_their_own_where_noise_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart, mixed = make(monkeypatch), make(monkeypatch, mixes_noise=True)
    assert key(apart) != key(apart, mode=SAMPLED)
    assert key(mixed) == key(mixed, mode=SAMPLED)
    assert key(mixed).mode.noise
    penalized = SamplingMode(penalize=True)
    assert key(mixed, mode=penalized) != key(mixed)


def test_the_usual_rounds_are_captured_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, seen, told = make(monkeypatch, mixes_noise=True), list[GraphKey](), list[Any]()
    monkeypatch.setattr(graphs, "_get", seen.append)
    graphs.capture([CHAIN, PLAIN], progress=lambda *done: told.append(done))
    sizes = [(one.shape, one.num_requests) for one in seen]
    assert sizes == [(shape, size) for shape in (CHAIN, PLAIN) for size in (6, 4, 2, 1)]
    assert all(one == key(graphs, one.num_requests) for one in seen if one.shape == CHAIN)
    assert told[-1] == (8, 8)
