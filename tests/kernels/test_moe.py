"""Rows by expert in blocks, against a loop over rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.kernels import moe
from eyas.kernels.moe import block_rows, group_rows, grouped_linear, num_blocks

SETTINGS = settings(derandomize=True, deadline=None, max_examples=80)


@SETTINGS
@given(data=st.data(), num_experts=st.integers(1, 12), num_rows=st.integers(1, 150))
def test_every_row_lies_in_a_block_of_its_expert(
    data: st.DataObject, num_experts: int, num_rows: int
) -> None:
    """For any choice, all rows for one expert included; the shapes depend on sizes alone."""
    some = data.draw(st.integers(1, num_experts))
    expert = data.draw(st.lists(st.integers(0, some - 1), min_size=num_rows, max_size=num_rows))
    groups = group_rows(torch.tensor(expert), num_experts=num_experts)
    size = block_rows(num_rows, num_experts)
    assert groups.source_BM.shape == (num_blocks(num_rows, num_experts), size)
    places = groups.place_R.tolist()
    assert len(set(places)) == num_rows
    for row, place in enumerate(places):
        assert int(groups.source_BM.flatten()[place]) == row
        assert int(groups.expert_B[place // size]) == expert[row]
    assert int(groups.source_BM.min()) >= 0 and int(groups.source_BM.max()) < num_rows
    assert 0 <= int(groups.expert_B.min()) and int(groups.expert_B.max()) < num_experts


@pytest.mark.parametrize("num_rows", [1, 7, 40, 333])
@pytest.mark.parametrize("most", [1, 1 << 25])
def test_products_equal_a_loop(num_rows: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether matrices are expanded one by one or all together."""
    monkeypatch.setattr(moe, "MAX_GATHERED", most)
    generator = torch.Generator().manual_seed(num_rows)
    weight_EOI = torch.randn(5, 6, 4, generator=generator)
    x_RI = torch.randn(num_rows, 4, generator=generator)
    expert_R = torch.randint(0, 5, (num_rows,), generator=generator)
    groups = group_rows(expert_R, num_experts=5)
    asked: list[int] = []

    def weights(index_N: torch.Tensor) -> torch.Tensor:
        asked.append(len(index_N))
        return weight_EOI[index_N]

    out_BMO = grouped_linear(x_RI[groups.source_BM], groups.expert_B, weights, matrix_size=24)
    expected = torch.stack([weight_EOI[e] @ x for e, x in zip(expert_R, x_RI, strict=True)])
    torch.testing.assert_close(out_BMO.flatten(0, 1)[groups.place_R], expected)
    assert sum(asked) == len(groups.expert_B) and max(asked) == (1 if most == 1 else sum(asked))


def test_blocks_grow_with_what_an_expert_gets() -> None:
    """One row each where rows are few, so that no product is for nothing."""
    assert block_rows(8, 384) == 1 and num_blocks(8, 384) == 8
    assert block_rows(384 * 5, 384) == 4
    assert block_rows(10**6, 8) == moe.MAX_BLOCK_ROWS
    assert num_blocks(2048, 8) * 64 <= 2048 + 8 * 63
