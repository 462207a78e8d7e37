"""The ranks that hold one model together.

A `Group` alone has no wires: of one rank it costs nothing (every operation returns its input); of
several it tells who holds what, which is all that a plan needs. `comm.distributed` adds the wires.
"""

from __future__ import annotations

from torch import Tensor


class Group:
    """Rank `rank` of `size`. Raises ValueError where that cannot be."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of {size}")
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same bytes on each; may overwrite x."""
        self._require_alone()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors of one shape joined along the last dimension, in order of rank."""
        self._require_alone()
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's tensor on every rank; may overwrite x."""
        self._require_alone()
        return x

    def _require_alone(self) -> None:
        assert self.size == 1, "this group only plans: it has no wires to other ranks"


ALONE = Group()
