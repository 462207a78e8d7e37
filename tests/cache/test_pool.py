"""The tensors under the pages."""

import torch

from eyas.cache.pool import NULL_PAGE, NUM_RESERVED_PAGES, TRASH_PAGE, KVPool
from eyas.contract.attention import KVLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=5, v_head_dim=4)


def pool(dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool(
        LAYOUT,
        num_pages=6,
        page_size=4,
        num_slots=3,
        num_scratch_rows=7,
        dtype=dtype,
        device="cpu",
    )


def test_sizes() -> None:
    made = pool(torch.bfloat16)
    assert made.k_LRKD.shape == (3, 6 * 4 + 3 * 7, 2, 5)
    assert made.v_LRKD.shape == (3, 6 * 4 + 3 * 7, 2, 4)
    assert LAYOUT.elements_per_token == 3 * 2 * 9
    assert made.num_bytes == LAYOUT.elements_per_token * (6 * 4 + 3 * 7) * 2
    assert made.num_page_rows == 24


def test_the_trash_row_is_in_a_reserved_page_and_not_the_null_page() -> None:
    made = pool()
    assert made.trash_row // made.page_size == TRASH_PAGE != NULL_PAGE
    assert {NULL_PAGE, TRASH_PAGE} == set(range(NUM_RESERVED_PAGES))


def test_poison_spares_the_null_page_only() -> None:
    made = pool()
    made.poison()
    for tensor in (made.k_LRKD, made.v_LRKD):
        assert not tensor[:, :4].any()
        assert tensor[:, 4:].isnan().all()


def test_copies_keys_and_values_of_all_layers() -> None:
    made = pool()
    made.k_LRKD.copy_(torch.randn(made.k_LRKD.shape))
    made.v_LRKD.copy_(torch.randn(made.v_LRKD.shape))
    k, v = made.k_LRKD.clone(), made.v_LRKD.clone()
    made.copy_rows(torch.tensor([30, 31]), torch.tensor([9, 20]))
    k[:, [9, 20]], v[:, [9, 20]] = k[:, [30, 31]], v[:, [30, 31]]
    assert torch.equal(made.k_LRKD, k) and torch.equal(made.v_LRKD, v)
