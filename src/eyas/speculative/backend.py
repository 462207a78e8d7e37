"""What the round needs of attention and KV storage; `attention.torch_backend` satisfies it.

Shape suffixes as in `attention.torch_backend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from eyas.contract.attention import Attention


class Pool(Protocol):
    """What the round needs of a KV pool (cache.pool.KVPool)."""

    page_size: int
    num_page_rows: int  # rows of all pages; the slots' scratch rows come after them
    num_scratch_rows: int  # a slot

    @property
    def trash_row(self) -> int:
        """A row that nobody reads."""

    def copy_rows(self, source_T: Tensor, destination_T: Tensor) -> None:
        """Copy rows in all layers."""


class Backend(Protocol):
    """Plans attention for the forwards of a round."""

    @property
    def pool(self) -> Pool:
        """The pool that the plans read and write."""

    def scratch_rows(self, slots_B: Tensor, node_Q: Tensor) -> Tensor:
        """Pool rows of scratch nodes."""

    def plan_tree(
        self,
        *,
        page_table_BP: Tensor,
        slots_B: Tensor,
        first_index: int,
        end_index_B: Tensor,
        visible_BQN: Tensor,
        first_node: int,
        max_kv_len: int,
    ) -> Attention:
        """Paged prefix and masked scratch tail."""

    def plan_prefill(
        self, *, page_table_BP: Tensor, chunks: Sequence[tuple[int, int]], device: torch.device
    ) -> Attention:
        """Causal prompt chunks."""

    def plan_write(self, write_T: Tensor) -> Attention:
        """Only store."""
