"""HCCL groups of a worker, and the collectives that layers call.

A ``CommGroup`` with one member does not communicate: its collectives return their input. So a layer
needs no special code for a single rank.
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

from dist_aclgraph.comm.marks import NO_MARKS, CollectiveMarks
from dist_aclgraph.device.npu import hccl_options, translated
from dist_aclgraph.device.versions import installed_line
from dist_aclgraph.environment import set_hccl_buffsize
from dist_aclgraph.topology import GroupKind, ParallelLayout

_all_gather = getattr(dist, installed_line().all_gather)
_reduce_scatter = getattr(dist, installed_line().reduce_scatter)


@dataclass(eq=False)
class CommGroup:
    """Ranks that communicate with each other. A layer uses the same object until the layer is
    deleted; see ``become``.

    Attributes:
        ranks: the members as ranks of the lockstep group, in group order.
        rank: this process's index in ``ranks``.
        handle: torch.distributed's process group; None for a group with one member.
        marks: an object that records which collective the rank's device has reached. All groups of
            the rank share this object.
    """

    ranks: tuple[int, ...]
    rank: int
    handle: Any = None
    marks: CollectiveMarks = NO_MARKS

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the group, in place. All members must pass tensors of the same shape."""
        if self.size > 1:
            self.marks.before("all_reduce")
            dist.all_reduce(x, group=self.handle)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the ``x`` of all members as one tensor [size, *x.shape], in group order."""
        if self.size == 1:
            return x.unsqueeze(0)
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        self.marks.before("all_gather")
        _all_gather(out, x, group=self.handle)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the group and return this member's part: [n * size, ...] -> [n, ...].

        Member i gets part i.
        """
        if self.size == 1:
            return x
        out = torch.empty((x.shape[0] // self.size, *x.shape[1:]), dtype=x.dtype, device=x.device)
        self.marks.before("reduce_scatter")
        _reduce_scatter(out, x, group=self.handle)
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        """Send each member its part of ``x``, and return the parts that this member receives.

        ``x`` and the result are [n * size, ...]: one part [n, ...] for each member, in group order.
        """
        if self.size == 1:
            return x
        out = torch.empty_like(x)
        self.marks.before("all_to_all")
        dist.all_to_all_single(out, x, group=self.handle)
        return out

    @property
    def backend(self) -> Any:
        """The torch_npu object that implements ``handle``."""
        return self.handle._get_backend(torch.device("npu"))

    @cached_property
    def hccl_name(self) -> str:
        """HCCL's name of the group's communicator, for operators that communicate inside their
        kernel.

        Reading the name creates the communicator, without sending data. All members must read the
        name, and no member may read it during a capture.
        """
        return str(self.backend.get_hccl_comm_name(self.rank))

    def become(self, other: CommGroup) -> None:
        """Replace this object's process group by that of ``other``. ``other`` has the same ranks,
        some of which run in new processes.
        """
        assert (self.ranks, self.rank) == (other.ranks, other.rank)
        self.handle = other.handle
        self.__dict__.pop("hccl_name", None)


ALONE = CommGroup((0,), 0)


@dataclass(frozen=True)
class RankGroups:
    """The groups of one rank.

    Attributes:
        tp: ranks among which each layer is split.
        ep: ranks among which the experts are divided, each expert as a whole. If each expert is
            split among the ranks of ``tp``, the group ``ep`` has one member.
        mc2: a second group with the ranks of ``ep``, for operators that communicate inside their
            kernel; None if no such operator is used.
        pcp: ranks that share the computation of prompts.
        dcp: ranks that share the KV cache of a request. The rank with index i in this group has
            shard i of the cache.
        dp_rank: index of the data-parallel batch that this rank runs.
    """

    tp: CommGroup
    ep: CommGroup
    dp_rank: int = 0
    mc2: CommGroup | None = None
    pcp: CommGroup = ALONE
    dcp: CommGroup = ALONE

    @property
    def marks(self) -> CollectiveMarks:
        """The ``CollectiveMarks`` that all groups of the rank share."""
        return self.tp.marks

    def become(self, other: RankGroups) -> None:
        """Replace all process groups by the process groups of ``other``. References to the
        ``CommGroup`` objects stay valid.
        """
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
        rendezvous: if all members are on one node, ``file:///path``, so that no port is opened. If
            members are on several nodes, ``tcp://address:port`` of rank 0.
        rank: rank inside the lockstep group.
        size: number of members of the lockstep group.
        timeout_s: maximum time for joining, in seconds.
        meeting: the socket that listens at ``rendezvous``; None unless this is rank 0 and
            ``rendezvous`` is a TCP address. torch owns the socket after this call. Without this
            socket, torch would listen at every address of the machine.
        buffer_mb: see ``make_groups``.

    Raises:
        DeviceError: a member did not join in time, or HCCL reported an error.
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
    """Leave the HCCL world, without waiting for other ranks.

    The processes of other members may have exited already. Graphs that contain collectives of this
    world must be released before this call. Objects that use groups of this world need new groups
    after this call (``RankGroups.become``).

    Raises:
        DeviceError: HCCL reported an error.
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
    marks: CollectiveMarks = NO_MARKS,
) -> RankGroups:
    """Return the groups of ``rank``. Groups with the same ranks share one communicator. Only the
    group ``mc2`` has a separate communicator.

    Every rank of the world must call this.

    Args:
        layout: the layout of one lockstep group; see ``ParallelLayout.within_group``.
        rank: rank within the lockstep group.
        buffer_mb: size of the HCCL buffer of each communicator, in MB; None means HCCL_BUFFSIZE.
            The communicator of ``mc2`` has the size ``mc2_buffer_mb``.
        mc2_buffer_mb: size of the HCCL buffer of the communicator of ``mc2``, in MB; None means
            HCCL_BUFFSIZE.
        watchdog_s: time limit of each eager collective, in seconds; None means ``timeout_s`` of
            ``join_lockstep_group``.
        marks: an object that records which collective of these groups the rank's device has
            reached.
    """
    if mc2_buffer_mb is not None:
        # Some releases of MC2's operators ignore the buffer size in the options of a process group.
        # These releases read HCCL_BUFFSIZE, which this call sets.
        set_hccl_buffsize(mc2_buffer_mb)
    handles: dict[tuple[int, ...], Any] = {}
    shared = len(layout.domains) - len(layout.mc2_domains)
    for members in layout.domains[:shared]:
        is_world = len(members) == layout.world_size
        handles[members] = dist.group.WORLD if is_world else _new_group(members, buffer_mb)

    def group_of(kind: GroupKind) -> CommGroup:
        members = layout.group_of(kind, rank)
        return CommGroup(members, members.index(rank), handles.get(members), marks)

    mc2 = None
    for members in layout.mc2_domains:
        handle = _new_group(members)
        if rank in members:
            mc2 = CommGroup(members, members.index(rank), handle, marks)
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
        # Reading the name creates the communicator. All members read the name here, at the same
        # time.
        assert mc2.hccl_name
    return groups


def _new_group(members: tuple[int, ...], buffer_mb: int | None = None) -> Any:
    return dist.new_group(list(members), pg_options=hccl_options(buffer_mb))
