"""Ranks joined by torch's process groups: NCCL between GPUs, gloo between CPUs.

The groups are objects of their own and not torch's global one, so that a program may have a group
itself, or several models side by side.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from eyas.comm.group import Group

# Its stubs name few of its classes.
_dist: Any = torch.distributed

JOIN_SECONDS = 120.0  # for the slowest rank to come
_LOOPBACK = "127.0.0.1"


class DistributedGroup(Group):
    """A group with wires. All ranks must call the same operations in the same order."""

    def __init__(self, backend: Any, *, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._backend = backend

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same bytes on each; overwrites a contiguous x."""
        x = x.contiguous()
        self._backend.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors of one shape joined along the last dimension, in order of rank."""
        x = x.contiguous()
        parts = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self._backend._allgather_base(parts, x).wait()
        return parts.view(self.size, *x.shape).movedim(0, -2).flatten(-2)

    def abort(self) -> None:
        """Break the wires: who waits in an operation gets an error."""
        self._backend.abort()

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's tensor on every rank; overwrites a contiguous x."""
        x = x.contiguous()
        options = _dist.BroadcastOptions()
        options.rootRank = 0
        self._backend.broadcast([x], options).wait()
        return x


def open_store(host: str = _LOOPBACK) -> Any:
    """Where ranks meet, a torch store on a port that the system chooses (`store.port`)."""
    return _dist.TCPStore(
        host, 0, is_master=True, wait_for_workers=False, timeout=_seconds(JOIN_SECONDS)
    )


def find_store(port: int, host: str = _LOOPBACK) -> Any:
    """The store that another rank has opened."""
    return _dist.TCPStore(host, port, is_master=False, timeout=_seconds(JOIN_SECONDS))


def join(
    store: Any,
    *,
    rank: int,
    size: int,
    device: torch.device | str = "cpu",
    timeout_seconds: float = JOIN_SECONDS,
) -> Group:
    """Meet the other ranks; returns when all are there.

    device: where tensors live; a GPU must be the current device. timeout_seconds: for one
    operation. Raises RuntimeError when a rank does not come.
    """
    if size == 1:
        return Group()
    timeout = _seconds(timeout_seconds)
    if torch.device(device).type == "cuda":
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend = _dist.ProcessGroupNCCL(_dist.PrefixStore("nccl", store), rank, size, options)
    else:
        backend = _dist.ProcessGroupGloo(_dist.PrefixStore("gloo", store), rank, size, timeout)
    group = DistributedGroup(backend, rank=rank, size=size)
    group.all_reduce(torch.zeros(1, device=device))  # wires are laid at the first operation
    return group


def _seconds(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
