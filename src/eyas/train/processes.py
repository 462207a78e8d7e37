"""The processes that train together: each takes its share of every step's batches."""

from __future__ import annotations

import dataclasses
import os

import torch
import torch.distributed as dist
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Processes:
    """rank and number of processes; alone, every collective is a no-op."""

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> Processes:
        """Those of torch.distributed's default group if there is one, else this one alone."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def is_first(self) -> bool:
        """Whether this one writes files and reports."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes."""
        if self.count > 1:
            dist.all_reduce(tensor)

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            dist.barrier()


def join_launcher(device: torch.device | str) -> Processes:
    """Join the group that a launcher (torchrun) describes in the environment, if it does: nccl for
    CUDA devices (one a process, by LOCAL_RANK), gloo otherwise."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        is_cuda = torch.device(device).type == "cuda"
        if is_cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if is_cuda else "gloo")
    return Processes.current()
