"""HCCL groups of a worker, and the collectives that layers call.

A ``CommGroup`` with one member communicates with nobody: its collectives return their input, so
layers need no case for a single rank.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dist_aclgraph.device.npu import translated


@dataclass(frozen=True)
class CommGroup:
    """Ranks that communicate.

    Attributes:
        ranks: members, in group order, as ranks of the lockstep group.
        rank: this process's index in ``ranks``.
        handle: torch.distributed's process group; None for a group of one.
    """

    ranks: tuple[int, ...]
    rank: int
    handle: Any = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the group, in place; every member passes the same shape."""
        if self.size > 1:
            dist.all_reduce(x, group=self.handle)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return [size, *x.shape]: every member's ``x``, in group order."""
        if self.size == 1:
            return x.unsqueeze(0)
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_single(out, x, group=self.handle)
        return out


def join_lockstep_group(rendezvous: str, rank: int, size: int, timeout_s: float) -> None:
    """Make this process a member of its lockstep group's HCCL world.

    Args:
        rendezvous: ``file:///path`` where all members share a node (no port is opened), else
            ``tcp://address:port`` of the member that leads.
        rank: rank inside the lockstep group.
        size: members of the lockstep group.
        timeout_s: limit of joining and of every collective.

    Raises:
        DeviceError: a member did not come, or HCCL refused.
    """
    with translated(f"joining the HCCL world as rank {rank} of {size}"):
        dist.init_process_group(
            "hccl",
            init_method=rendezvous,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )


def make_group(ranks: Sequence[int], rank: int) -> CommGroup:
    """Return the group of ``ranks`` that ``rank`` belongs to.

    Collective: every rank of the world calls it with the same groups in the same order.
    """
    members = tuple(ranks)
    handle = None
    if len(members) > 1:
        is_world = len(members) == dist.get_world_size()
        handle = dist.group.WORLD if is_world else dist.new_group(list(members))
    return CommGroup(members, members.index(rank), handle)
