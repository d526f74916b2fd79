"""HCCL groups of a worker, and the collectives that layers call.

A ``CommGroup`` with one member does not communicate: its collectives return their input, so layers
need no case for a single rank.
"""

from __future__ import annotations

import datetime
import socket
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from dist_aclgraph.device.npu import hccl_options, translated
from dist_aclgraph.environment import set_hccl_buffsize
from dist_aclgraph.topology import GroupKind, ParallelLayout


@dataclass(eq=False)
class CommGroup:
    """Ranks that communicate. Layers hold it for as long as they live.

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

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the group and return this member's part: [n * size, ...] -> [n, ...].

        The first member gets the first part.
        """
        if self.size == 1:
            return x
        out = torch.empty((x.shape[0] // self.size, *x.shape[1:]), dtype=x.dtype, device=x.device)
        dist.reduce_scatter_single(out, x, group=self.handle)
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        """Send each member its part of ``x``, and return the parts that this member receives.

        [n * size, ...] -> [n * size, ...]: parts are equal, and in group order.
        """
        if self.size == 1:
            return x
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=self.handle)
        return out

    @property
    def backend(self) -> Any:
        """The backend object of torch_npu behind ``handle``."""
        return self.handle._get_backend(torch.device("npu"))

    @cached_property
    def hccl_name(self) -> str:
        """HCCL's name of the communicator, for operators that communicate by themselves.

        Makes the communicator. All members must call this, outside captures; nothing is sent.
        """
        return str(self.backend.get_hccl_comm_name(self.rank))

    def become(self, other: CommGroup) -> None:
        """Use the groups of ``other`` from now on: the same ranks, in other processes."""
        assert (self.ranks, self.rank) == (other.ranks, other.rank)
        self.handle = other.handle
        self.__dict__.pop("hccl_name", None)


ALONE = CommGroup((0,), 0)


@dataclass(frozen=True)
class RankGroups:
    """The groups of one rank.

    Attributes:
        tp: ranks that share each layer; ``ep``: ranks that share the experts; a group of one if
            every tensor parallel group has all of them.
        mc2: the ranks of ``ep`` again, for operators that communicate inside their kernel; None
            without such operators.
        pcp: ranks that share the computation of prompts; ``dcp``: those that share the KV cache of
            a request, where a rank's index is its shard.
        dp_rank: index of the batch, in the lockstep group, that the rank runs.
    """

    tp: CommGroup
    ep: CommGroup
    dp_rank: int = 0
    mc2: CommGroup | None = None
    pcp: CommGroup = ALONE
    dcp: CommGroup = ALONE

    def become(self, other: RankGroups) -> None:
        """Use the groups of ``other`` from now on; objects that hold these groups keep them."""
        for mine, its in (
            (self.tp, other.tp),
            (self.ep, other.ep),
            (self.pcp, other.pcp),
            (self.dcp, other.dcp),
            (self.mc2, other.mc2),
        ):
            if mine is not None and its is not None:
                mine.become(its)


ONE_RANK = RankGroups(ALONE, ALONE)


def join_lockstep_group(
    rendezvous: str,
    rank: int,
    size: int,
    timeout_s: float,
    meeting: socket.socket | None = None,
    *,
    buffer_mb: int | None = None,
) -> None:
    """Make this process a member of its lockstep group's HCCL world.

    Args:
        rendezvous: ``file:///path`` where all members share a node (no port is opened), else
            ``tcp://address:port`` of rank 0.
        rank: rank inside the lockstep group.
        size: members of the lockstep group.
        timeout_s: limit of joining.
        meeting: rank 0's socket that listens at a TCP ``rendezvous``; torch owns it from here on. A
            socket that torch opens itself would listen at every address of the machine.
        buffer_mb: see ``make_groups``.

    Raises:
        DeviceError: a member did not arrive, or HCCL refused.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    with translated(f"joining the HCCL world as rank {rank} of {size}"):
        store = _open_store(rendezvous, size, timeout, meeting)
        dist.init_process_group(
            "hccl",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            pg_options=hccl_options(buffer_mb),
        )


def leave_lockstep_group() -> None:
    """End this process's membership of its HCCL world, whichever other members still live.

    Waits for no other rank. Graphs with collectives of the world must be released before. Objects
    that use its groups need new ones afterwards, see ``RankGroups.become``.

    Raises:
        DeviceError: HCCL refused.
    """
    if dist.is_initialized():
        with translated("leaving the HCCL world"):
            dist.destroy_process_group()


def _open_store(
    rendezvous: str, size: int, timeout: datetime.timedelta, meeting: socket.socket | None
) -> Any:
    """Return the store in which the members of a world exchange their addresses."""
    where = urlsplit(rendezvous)
    if where.scheme == "file":
        return dist.FileStore(where.path, size)  # type: ignore[attr-defined]
    assert where.hostname is not None and where.port is not None
    return dist.TCPStore(  # type: ignore[attr-defined]
        where.hostname,
        where.port,
        size,
        is_master=meeting is not None,
        timeout=timeout,
        master_listen_fd=None if meeting is None else meeting.detach(),
    )


def make_groups(
    layout: ParallelLayout,
    rank: int,
    *,
    buffer_mb: int | None = None,
    mc2_buffer_mb: int | None = None,
    watchdog_s: float | None = None,
) -> RankGroups:
    """Return the groups of ``rank``; groups of the same ranks share one communicator, except MC2's.

    Collective: every rank of the world calls it.

    Args:
        layout: of the lockstep group, see ``ParallelLayout.within_group``.
        rank: within the lockstep group.
        buffer_mb: HCCL's buffer of every domain but MC2's; None takes HCCL_BUFFSIZE.
        mc2_buffer_mb: HCCL's buffer of MC2's domain, if ``layout`` has one; None likewise.
        watchdog_s: limit of every eager collective; None takes the limit of joining.
    """
    if mc2_buffer_mb is not None:
        # By the variable, because some releases of MC2's operators do not read the domain's option.
        set_hccl_buffsize(mc2_buffer_mb)
    handles: dict[tuple[int, ...], Any] = {}
    shared = len(layout.domains) - len(layout.mc2_domains)
    for members in layout.domains[:shared]:
        is_world = len(members) == layout.world_size
        handles[members] = dist.group.WORLD if is_world else _new_group(members, buffer_mb)

    def group_of(kind: GroupKind) -> CommGroup:
        members = layout.group_of(kind, rank)
        return CommGroup(members, members.index(rank), handles.get(members))

    mc2 = None
    for members in layout.mc2_domains:
        handle = _new_group(members)
        if rank in members:
            mc2 = CommGroup(members, members.index(rank), handle)
    groups = RankGroups(
        group_of("tp"),
        group_of("ep"),
        layout.coordinates(rank).dp,
        mc2,
        group_of("pcp"),
        group_of("dcp"),
    )
    for group in (groups.tp, groups.ep, groups.pcp, groups.dcp, mc2):
        if watchdog_s is not None and group is not None and group.handle is not None:
            group.backend._set_default_timeout(datetime.timedelta(seconds=watchdog_s))
    if mc2 is not None:
        assert mc2.hccl_name  # made here, where all members are
    return groups


def _new_group(members: tuple[int, ...], buffer_mb: int | None = None) -> Any:
    return dist.new_group(list(members), pg_options=hccl_options(buffer_mb))
