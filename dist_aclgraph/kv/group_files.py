"""Finds out which files of KV blocks each node of a lockstep group has, and which files each node
reads from other nodes.

Each worker writes its part of a KV block to a file on the worker's node. So if the workers of a
group are on several nodes, each node has only some of the files. All functions of this module are
pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

from dist_aclgraph.config import Config
from dist_aclgraph.kv.tiers import CachePlace
from dist_aclgraph.shapes.model_facts import ModelFacts
from dist_aclgraph.topology import ParallelLayout

Nodes = tuple[int, ...]  # indices of nodes of a group


@dataclass(frozen=True)
class Holders:
    """The nodes that have the files of one data-parallel rank.

    Attributes:
        blocks: for each element of ``CachePlace.all_places``, the nodes on which a worker keeps
            this part of the blocks.
        states: for each element of ``CachePlace.all_state_places``, the nodes on which a worker
            keeps this part of the recurrent states.
    """

    blocks: tuple[Nodes, ...]
    states: tuple[Nodes, ...] = ()


@dataclass(frozen=True)
class Route:
    """The node from which each file is read. Each file contains one part of the cache. ``blocks``
    and ``states`` map the index of a part to the index of a node; None stands for the reading node
    itself. A route contains only the parts that the reading node needs.

    Attributes:
        blocks: a key is an index in ``CachePlace.all_places``; its value is the index of the node
            that sends the file.
        states: a key is an index in ``CachePlace.all_state_places``; its value is the index of the
            node that sends the file.
    """

    blocks: dict[int, int | None]
    states: dict[int, int | None]

    @property
    def nodes(self) -> set[int]:
        """The other nodes from which the reading node reads files."""
        return {node for node in (self.blocks | self.states).values() if node is not None}


@dataclass(frozen=True)
class GroupFiles:
    """The part of the cache that each worker of a lockstep group keeps, and the node of each
    worker.

    Attributes:
        places: for each worker of a data-parallel rank, the part of the cache that the worker
            keeps.
        node_ids: Ray's id of each worker's node; the index is the group rank. The group's engine is
            on the first worker's node.
        only_workers: if true, workers fetch and send files on every node, because the transport
            needs a device. If false, the engine fetches and sends the files of the engine's node,
            and workers do this only on the other nodes.
    """

    places: tuple[CachePlace, ...]
    node_ids: tuple[str, ...]
    only_workers: bool = False

    @classmethod
    def of(
        cls,
        config: Config,
        facts: ModelFacts,
        node_ids: Sequence[str],
        *,
        only_workers: bool = False,
    ) -> GroupFiles | None:
        """Return the files of a group whose workers are on these nodes; None if no copies of KV are
        kept.

        Args:
            node_ids: Ray's id of each worker's node; the index is the group rank.
            only_workers: see ``GroupFiles``.
        """
        layout, places = ParallelLayout.from_config(config.parallel), list[CachePlace]()
        for rank in range(layout.tp * layout.pcp):
            dcp_rank = layout.group_of("dcp", rank).index(rank)
            place = CachePlace.of(config, facts, layout.coordinates(rank).tp, dcp_rank)
            if place is None:
                return None
            places.append(place)
        return cls(tuple(places), tuple(node_ids), only_workers)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The ids of the group's nodes. The engine's node comes first."""
        return tuple(dict.fromkeys(self.node_ids))

    def ranks_of(self, dp_rank: int) -> range:
        """Return the group ranks of the workers of a data-parallel rank."""
        size = len(self.places)
        return range(dp_rank * size, (dp_rank + 1) * size)

    @property
    def num_dp(self) -> int:
        return len(self.node_ids) // len(self.places)

    def is_beside_engine(self, dp_rank: int) -> bool:
        """Return whether a worker of the data-parallel rank ``dp_rank`` is on the engine's node."""
        return any(self.node_ids[rank] == self.nodes[0] for rank in self.ranks_of(dp_rank))

    def finders(self, dp_rank: int) -> list[int]:
        """Return the workers that look up and fetch files for a data-parallel rank: the rank's
        first worker on each node. If ``only_workers`` is false, the engine itself looks up and
        fetches the files of the engine's node. In this case, the result contains no worker of that
        node.
        """
        first: dict[str, int] = {}
        for rank in self.ranks_of(dp_rank):
            first.setdefault(self.node_ids[rank], rank)
        return [rank for node_id, rank in first.items() if node_id in self._nodes_of_workers]

    @property
    def servers(self) -> list[int]:
        """The workers that send files to other groups: the first worker on each node, in the order
        of ``nodes``. If ``only_workers`` is false, the engine's node is left out.
        """
        return [self.node_ids.index(node_id) for node_id in self._nodes_of_workers]

    @property
    def _nodes_of_workers(self) -> tuple[str, ...]:
        """The nodes on which workers fetch and send files."""
        return self.nodes if self.only_workers else self.nodes[1:]

    def places_beside(self, rank: int) -> tuple[CachePlace, ...]:
        """Return the parts of the cache that are on the node of the worker ``rank``, and belong to
        the worker's data-parallel rank. The parts are in the order of ``CachePlace.all_places``,
        without duplicates.
        """
        ranks, size = self.ranks_of(rank // len(self.places)), len(self.places)
        there = {self.places[r % size] for r in ranks if self.node_ids[r] == self.node_ids[rank]}
        return tuple(sorted(there, key=lambda place: (place.heads, place.shard, place.rank)))

    @property
    def holders(self) -> tuple[Holders, ...]:
        """For each data-parallel rank, the nodes that have its files. Equal elements are listed
        once.
        """
        return tuple(dict.fromkeys(self._holders(dp_rank) for dp_rank in range(self.num_dp)))

    def _holders(self, dp_rank: int) -> Holders:
        node_of = [self.nodes.index(self.node_ids[rank]) for rank in self.ranks_of(dp_rank)]
        places, first = self.places, self.places[0]

        def nodes_of(workers: Iterable[bool]) -> Nodes:
            return tuple(sorted(set(compress(node_of, workers))))

        return Holders(
            tuple(nodes_of(p.folder == of.folder for p in places) for of in first.all_places),
            tuple(
                nodes_of(p.rank == of.rank for p in self.places) for of in first.all_state_places
            ),
        )


def routes(
    source: CachePlace,
    holders: Sequence[Holders],
    readers: Collection[CachePlace],
    *,
    here: int | None = None,
    turn: int = 0,
    load: Callable[[int], int] = lambda node: 0,
) -> list[Route]:
    """Return routes, which say from which nodes of a source group the reading node can read the
    files that it needs.

    Each route names a node for every file. There is one route for each data-parallel rank of the
    source group, because the reader does not know which of these ranks has computed the blocks. A
    route is omitted if all of its files are on the reading node itself.

    Args:
        source: the part of the cache that the first worker of the source group keeps.
        readers: the parts of the cache that the workers on the reading node keep.
        here: index of the reading node among the source group's nodes; None if the reading node is
            not one of these nodes.
        turn: if several nodes with the same load have a file, this number chooses the node from
            which the file is read. Readers with different numbers use different nodes.
        load: returns the load of a node. If several nodes have a file, the file is read from a node
            with the lowest load.
    """
    blocks = [
        index
        for index, place in enumerate(source.all_places)
        if any(overlaps(place, reader) for reader in readers)
    ]
    states = [
        place.rank
        for place in source.all_state_places
        if any((place.rank, place.num_ranks) == (r.rank, r.num_ranks) for r in readers)
    ]
    if not blocks or (source.has_state and not states):
        return []  # the source group does not have the parts that the readers need

    def choose(nodes: Nodes) -> int | None:
        first = turn % len(nodes)
        return None if here in nodes else min((*nodes[first:], *nodes[:first]), key=load)

    found = [
        Route(
            {index: choose(each.blocks[index]) for index in blocks},
            {index: choose(each.states[index]) for index in states},
        )
        for each in holders
    ]
    return [route for route in found if route.nodes]


def overlaps(place: CachePlace, other: CachePlace) -> bool:
    """Return whether two workers store overlapping parts of blocks, so that each of them can use
    the other worker's files. Their groups may have different numbers of ranks. See
    ``OtherLayouts``.
    """
    shards = [(p.shard, p.num_shards, p.interleave, p.num_kv_heads) for p in (place, other)]
    if shards[0] != shards[1]:
        return False
    part, other_part = place.part, other.part
    if part is None or other_part is None:
        return True
    ends = part.first + part.size, other_part.first + other_part.size
    return max(part.first, other_part.first) < min(ends)
