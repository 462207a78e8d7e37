"""Paged key/value tensors with a scratch area per slot (design D7).

A row holds one token's keys and values of one layer. Rows are numbered through pages first
(row = page * page_size + offset), then through the slots' scratch areas. Two pages are reserved:

- the null page is all zeros and never written; masked positions read it, so that whatever an
  unwritten row holds (NaN included) cannot reach an output;
- the trash page takes the writes of padding and of rejected rows, and is never read.

Shape suffixes: L layers, R rows, K key/value heads, D head size.
"""

from __future__ import annotations

import torch

from eyas import kernels
from eyas.contract.attention import KVLayout

NULL_PAGE, TRASH_PAGE, NUM_RESERVED_PAGES = 0, 1, 2


class KVPool:
    """Keys and values of one model for all pages and slots.

    num_pages counts the reserved pages, num_slots the trash slot; num_scratch_rows is per slot. The
    target's and the draft's pools have the same page ids and page size. v_LRKD has no elements
    where the value is part of the key (latent attention).
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        num_scratch_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.layout, self.page_size = layout, page_size
        self.num_page_rows = num_pages * page_size
        self.num_scratch_rows = num_scratch_rows
        num_rows = self.num_page_rows + num_slots * num_scratch_rows
        shape = (layout.num_layers, num_rows, layout.num_kv_heads)
        self.k_LRKD = torch.zeros(*shape, layout.head_dim, dtype=dtype, device=device)
        self.v_LRKD = torch.zeros(*shape, layout.v_head_dim, dtype=dtype, device=device)
        # (keys, values) by layer, as views made once: a forward indexes them twice a layer.
        self.layers = list(zip(self.k_LRKD.unbind(), self.v_LRKD.unbind(), strict=True))

    @property
    def trash_row(self) -> int:
        """A row that may be written by anybody and is read by nobody."""
        return TRASH_PAGE * self.page_size

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return self.k_LRKD.nbytes + self.v_LRKD.nbytes

    def copy_rows(self, source_T: torch.Tensor, destination_T: torch.Tensor) -> None:
        """Copy rows in all layers (commit: scratch -> pages); int64 row numbers.

        No row is both source and destination; what goes to the trash row may be left out.
        """
        # Values that are part of the keys have no elements of their own.
        pools = [self.k_LRKD, self.v_LRKD][: 1 + bool(self.layout.v_head_dim)]
        kernels.copy_cache_rows(pools, source_T, destination_T, trash_row=self.trash_row)

    def poison(self) -> None:
        """Fill everything but the null page with NaN: for tests that nothing unwritten is read."""
        for tensor in (self.k_LRKD, self.v_LRKD):
            tensor[:, self.page_size :] = float("nan")
