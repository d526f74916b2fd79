"""Computes ranks, coordinates and groups. No other module contains this arithmetic.

Ranks are laid out [dp, pcp, tp]; tp is the fastest axis. If two ranks meet in a collective, they
belong to the same lockstep group. A lockstep group has one scheduler and one graph plan, and is one
failure domain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, NewType

from dist_aclgraph.config import ParallelConfig
from dist_aclgraph.errors import ConfigError

GroupKind = Literal["tp", "dp", "pcp", "dcp", "ep"]
# the ways to send tokens to experts on other ranks
ExchangeKind = Literal["all_gather", "all_to_all", "mc2"]
# all_to_all loses tokens that do not fit into its buffers.
MAY_LOSE_TOKENS = frozenset[ExchangeKind | None](["all_to_all"])
GROUP_KINDS: tuple[GroupKind, ...] = ("tp", "dp", "pcp", "dcp", "ep")

# Messages for users contain world ranks. Group ranks begin at 0 in each lockstep group.
WorldRank = NewType("WorldRank", int)
GroupRank = NewType("GroupRank", int)
NO_RANK = WorldRank(-1)  # placeholder for a worker that has no rank yet, or whose rank is not known
Ranks = tuple[int, ...]
# the argument is the padded number of tokens of each rank
ChooseExchange = Callable[[int], ExchangeKind | None]


def no_exchange(num_tokens: int) -> ExchangeKind | None:
    """Return None. This function is the ``ChooseExchange`` of models without experts, and of models
    whose TP groups each have all experts.
    """
    return None


class Coordinates(NamedTuple):
    """The position of a rank on each axis of the layout."""

    dp: int
    pcp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """The sizes of all parallel axes, which do not depend on nodes, devices or HCCL.

    A group of ``ep`` ranks shares one set of experts. ``ep`` is 1, or a multiple of ``tp * pcp``
    that divides the number of world ranks. A group of ``dcp`` ranks shares a request's KV cache.
    ``dcp`` is 1, or ``pcp * n`` if n neighbouring TP ranks share the cache. The index of a rank's
    shard is the rank's index in its DCP group. With ``mc2``, experts have a second communication
    domain with the same ranks as the EP domain. Only operators that communicate inside their kernel
    may use this second domain.
    """

    tp: int = 1
    dp: int = 1
    pcp: int = 1
    dcp: int = 1
    ep: int = 1
    mc2: bool = False

    def __post_init__(self) -> None:
        for axis in GROUP_KINDS:
            if getattr(self, axis) < 1:
                raise ConfigError(f"parallel.{axis} is {getattr(self, axis)}; it must be positive")
        replica = self.tp * self.pcp
        if self.ep != 1 and (self.ep % replica or self.world_size % self.ep):
            raise ConfigError(
                f"parallel.ep is {self.ep}; it must be 1, or a multiple of tp x pcp ({replica}) "
                f"that divides the {self.world_size} ranks"
            )
        if self.dcp != 1 and (self.dcp % self.pcp or replica % self.dcp):
            raise ConfigError(
                f"parallel.dcp is {self.dcp}; it must be 1, or a multiple of pcp ({self.pcp}) that "
                f"divides tp x pcp ({replica}), whose ranks it shares"
            )

    @classmethod
    def from_config(cls, parallel: ParallelConfig, *, mc2: bool = False) -> ParallelLayout:
        return cls(
            tp=parallel.tp,
            dp=parallel.dp,
            pcp=parallel.pcp,
            dcp=parallel.dcp,
            ep=parallel.ep,
            mc2=mc2,
        )

    @property
    def world_size(self) -> int:
        return self.dp * self.pcp * self.tp

    @property
    def within_group(self) -> ParallelLayout:
        """The layout of one lockstep group, whose ranks are numbered from 0."""
        size = len(self.lockstep_groups[0])
        dp = size // (self.tp * self.pcp)
        return replace(self, dp=dp)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of world rank ``rank``."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is not one of the {self.world_size} ranks")
        rest, tp = divmod(rank, self.tp)
        dp, pcp = divmod(rest, self.pcp)
        return Coordinates(dp, pcp, tp)

    def rank_of(self, coordinates: Coordinates) -> int:
        """Return the world rank at ``coordinates``: the inverse of ``coordinates()``."""
        return (coordinates.dp * self.pcp + coordinates.pcp) * self.tp + coordinates.tp

    def groups(self, kind: GroupKind) -> tuple[Ranks, ...]:
        """Return all groups of a kind, ordered by first member. Each rank is in one group.

        The index of a rank within its TP group, for example, is its ``tp_rank``.
        """
        if kind == "tp":
            return _blocks(range(self.world_size), self.tp)
        if kind == "ep":
            return _blocks(range(self.world_size), self.ep)
        if kind == "dp":
            order = [(dp, pcp, tp) for pcp in self._pcp for tp in self._tp for dp in self._dp]
            return self._grouped(order, self.dp)
        # In a DCP group, PCP is the fastest axis, and then TP. The ranks of a group are in
        # ascending order. So the first ranks of a group have the same PCP rank, and together have
        # all heads of the group.
        order = [(dp, pcp, tp) for dp in self._dp for tp in self._tp for pcp in self._pcp]
        return self._grouped(order, self.pcp if kind == "pcp" else self.dcp)

    def group_of(self, kind: GroupKind, rank: int) -> Ranks:
        """Return the group of a kind that contains ``rank``."""
        return next(group for group in self.groups(kind) if rank in group)

    @cached_property
    def domains(self) -> tuple[Ranks, ...]:
        """The communication domains: distinct sets of two or more ranks that meet in collectives.

        If groups of two kinds have the same ranks, they use one communicator. The streams of this
        communicator are counted once. MC2 has a separate communicator, which is listed last. Copies
        of a dense model never communicate with each other. If experts are spread over copies of the
        model, the copies communicate in the EP domain.
        """
        kinds: tuple[GroupKind, ...] = ("tp", "pcp", "dcp", "ep")
        sets = {tuple(sorted(group)) for kind in kinds for group in self.groups(kind)}
        return (*sorted(ranks for ranks in sets if len(ranks) > 1), *self.mc2_domains)

    @property
    def mc2_domains(self) -> tuple[Ranks, ...]:
        """The domains that only MC2 uses."""
        return self.groups("ep") if self.mc2 and self.ep > 1 else ()

    def domains_of(self, rank: int) -> tuple[Ranks, ...]:
        """Return the communication domains that contain ``rank``."""
        return tuple(self._domains_by_rank[rank])

    @cached_property
    def lockstep_groups(self) -> tuple[Ranks, ...]:
        """The lockstep groups, ordered by first rank: the connected components of the domains."""
        leader = list(range(self.world_size))

        def find(rank: int) -> int:
            while leader[rank] != rank:
                leader[rank] = leader[leader[rank]]
                rank = leader[rank]
            return rank

        for first, *others in self.domains:
            for other in others:
                low, high = sorted((find(first), find(other)))
                leader[high] = low
        members: dict[int, list[int]] = {}
        for rank in range(self.world_size):
            members.setdefault(find(rank), []).append(rank)
        return tuple(tuple(group) for group in members.values())

    def lockstep_group_of(self, rank: int) -> int:
        """Return the index of the lockstep group that contains ``rank``."""
        return self._group_by_rank[rank]

    @cached_property
    def _domains_by_rank(self) -> dict[int, list[Ranks]]:
        found: dict[int, list[Ranks]] = {rank: [] for rank in range(self.world_size)}
        for domain in self.domains:
            for rank in domain:
                found[rank].append(domain)
        return found

    @cached_property
    def _group_by_rank(self) -> dict[int, int]:
        return {rank: i for i, group in enumerate(self.lockstep_groups) for rank in group}

    @property
    def _dp(self) -> range:
        return range(self.dp)

    @property
    def _pcp(self) -> range:
        return range(self.pcp)

    @property
    def _tp(self) -> range:
        return range(self.tp)

    def _grouped(self, order: Iterable[tuple[int, int, int]], size: int) -> tuple[Ranks, ...]:
        ranks = [self.rank_of(Coordinates(*point)) for point in order]
        return tuple(sorted(tuple(sorted(block)) for block in _blocks(ranks, size)))


def _blocks(ranks: Iterable[int], size: int) -> tuple[Ranks, ...]:
    flat = tuple(ranks)
    return tuple(flat[start : start + size] for start in range(0, len(flat), size))
