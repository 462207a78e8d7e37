"""The floor of a round, against figures worked out by hand."""

import dataclasses

import pytest
import torch

from eyas.bench import bandwidth, ceilings
from eyas.bench.ceilings import Ceilings, RoundCost, measure_ceilings
from eyas.config import PLAIN, TreeShape

RATES = Ceilings(
    copy_rate=100.0, read_rate=100.0, product_rate=1000.0, product_size=8, dtype="bfloat16"
)
COST = RoundCost(
    target_bytes=1000,
    target_kv_bytes=2,
    fc_bytes=60,
    draft_bytes=200,
    draft_kv_bytes=1,
    dtype_bytes=2,
    draft_dtype_bytes=2,
)
CHAIN = TreeShape(3, 1, 4)


def test_bytes_of_a_plain_round() -> None:
    floor = COST.floor(PLAIN, batch_size=1, context_tokens=50, ceilings=RATES)
    assert floor.num_bytes == 1000 + 100
    assert floor.num_flops == 2 * 500
    assert floor.seconds == pytest.approx(11.0)


def test_bytes_of_a_chain() -> None:
    floor = COST.floor(CHAIN, batch_size=1, context_tokens=50, ceilings=RATES)
    assert floor.num_bytes == 1000 + 60 + 3 * 200 + 50 * (2 + 3 * 1)
    assert floor.num_flops == 4 * 1000 + 4 * 60 + 3 * 200
    assert floor.seconds == pytest.approx(floor.num_bytes / 100)


def test_many_rows_cost_their_operations() -> None:
    # 40 rows of the target: 40000 operations take 40 s, its bytes 10.
    floor = COST.floor(CHAIN, batch_size=10, context_tokens=0, ceilings=RATES)
    assert floor.seconds == pytest.approx(40 + 40 * 60 / 1000 + 3 * 10 * 200 / 1000)


def test_a_tree_drafts_more_rows() -> None:
    tree = TreeShape(2, 8, 32)
    floor = COST.floor(tree, batch_size=2, context_tokens=0, ceilings=RATES)
    assert floor.num_flops == 64 * 1000 + 6 * 60 + (2 + 16) * 200


def test_a_wider_draft_has_fewer_numbers_a_byte() -> None:
    wide = dataclasses.replace(COST, draft_dtype_bytes=4)
    floors = [c.floor(CHAIN, batch_size=1, context_tokens=0, ceilings=RATES) for c in (COST, wide)]
    assert floors[0].num_bytes == floors[1].num_bytes
    assert floors[0].num_flops - floors[1].num_flops == (4 * 60 + 3 * 200) / 2


def test_without_a_draft_nothing_is_added() -> None:
    alone = RoundCost(
        target_bytes=1000,
        target_kv_bytes=2,
        fc_bytes=0,
        draft_bytes=0,
        draft_kv_bytes=0,
        dtype_bytes=2,
        draft_dtype_bytes=2,
    )
    floors = [c.floor(PLAIN, batch_size=4, context_tokens=9, ceilings=RATES) for c in (alone, COST)]
    assert floors[0] == floors[1]


def test_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bandwidth._BUFFER_BYTES, "cpu", 2**20)
    monkeypatch.setitem(ceilings._COPY_BYTES, "cpu", 2**20)
    monkeypatch.setitem(ceilings._PRODUCT_SIZE, "cpu", 64)
    found = measure_ceilings(torch.device("cpu"), torch.float32)
    assert (found.product_size, found.dtype) == (64, "float32")
    for rate in (found.copy_rate, found.read_rate, found.product_rate):
        assert 1e7 < rate < 1e14
