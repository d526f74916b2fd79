"""BlockFetches: fetches files of KV blocks from the nodes of other groups to this node.

A few threads copy files into the first tier of this node. A file gets its final name when it is
complete. Requests use a fetched file like the files that this node has written. If a fetch fails,
this group computes the missing tokens of the prompt. No request waits longer than ``QUEUE_S`` plus
``LIMIT_S``.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import msgspec

from dist_aclgraph.actors.wire.addresses import Endpoint
from dist_aclgraph.actors.wire.block_links import FileKey, SourceError, SourceLinks
from dist_aclgraph.actors.wire.block_server import BlockSource, FileKind, tiers_of
from dist_aclgraph.actors.wire.context import Context, make_context
from dist_aclgraph.actors.wire.lent_files import MemoryReader
from dist_aclgraph.actors.wire.messages import GroupList
from dist_aclgraph.config import Config
from dist_aclgraph.errors import PlacementError
from dist_aclgraph.kv.checkpoints import BlockHash
from dist_aclgraph.kv.group_files import Route, routes
from dist_aclgraph.kv.look_ups import Answer, FetchBlocks, Source
from dist_aclgraph.kv.tiers import CachePlace, KVTiers, cache_identity
from dist_aclgraph.logs import event

QUEUE_S = 5.0  # maximum number of seconds that a request waits for a free thread
LIMIT_S = 20.0  # maximum number of seconds from the beginning of a fetch until the request runs
SILENCE_S = 3.0  # a source that sends no file for this number of seconds counts as silent
PAUSE_S = 30.0  # for this number of seconds, nothing is fetched from a source that was silent
NUM_THREADS = 2

logger = logging.getLogger(__name__)

# Maps a file's kind and the index of its part of the cache to the node from which a fetch reads the
# file. None is this node. See ``Route``.
Endpoints = Mapping[FileKind, Mapping[int, Endpoint | None]]


@dataclass
class FetchCounts:
    """Counts of fetched blocks, since the start of an engine or a worker."""

    blocks: int = 0
    num_bytes: int = 0
    # Number of failed fetches: the fetch took too long, the source was silent, or the source sent
    # an invalid answer.
    failures: int = 0


@dataclass
class _MissingBlocks:
    """The blocks that a request lacks.

    Attributes:
        source: the group that has the files.
        names: the hashes of the blocks, in the order of the prompt.
        depth: number of the prompt's blocks that come before these blocks.
        is_wanted: a function that returns whether the request still waits.
        deadline_s: the time at which the request stops waiting. The request first waits for a free
            thread. When the fetch begins, the request gets a later deadline for the end of the
            fetch.
        ways: for each route, the nodes from which the files are read; see ``routes``. The routes
            are chosen when the fetch begins. A later route is used for the blocks that earlier
            routes did not find.
    """

    source: BlockSource
    names: Sequence[BlockHash]
    depth: int
    is_wanted: Callable[[], bool]
    deadline_s: float
    ways: Sequence[Endpoints] = ()
    done: threading.Event = field(default_factory=threading.Event)


class BlockFetches:
    """Owns the threads that fetch. Knows the groups from which files can be fetched. Any thread may
    call the methods.

    Args:
        node_id: Ray's id of this node.
        token: the deployment's token.
        places: for each worker of the group on this node, the part of the KV cache that the worker
            stores. Only files that these workers can use are fetched.
        group: name of this group, from which nothing is fetched.
        turn: a number that chooses between source nodes with equal loads (``routes``).
        reader: reads files in the memory of other nodes; None if the other nodes send the files in
            messages.
    """

    def __init__(
        self,
        config: Config,
        node_id: str,
        token: str,
        places: Collection[CachePlace],
        group: str = "",
        turn: int = 0,
        reader: MemoryReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._identity = cache_identity(config)
        self._node_id = node_id
        self._token = token
        self._places = places
        self._group = group
        self._turn = turn
        self._reader = reader
        self._clock = clock
        self._version = 0  # version of the group list that contained ``_sources``
        self._sources: dict[str, BlockSource] = {}
        self._others: set[str] = set()  # groups whose blocks this group cannot read
        self._paused: dict[str, float] = {}  # for each URL, the end of the pause after a failure
        self._files: dict[CachePlace, dict[FileKind, list[KVTiers]]] = {}
        self._warnings: set[str] = set()  # the warnings that were logged
        self._is_closing = False
        self._guard = threading.Lock()  # guards ``counts`` and the sources
        self.counts = FetchCounts()
        self._fetches: queue.SimpleQueue[_MissingBlocks | None] = queue.SimpleQueue()
        self._running: list[_MissingBlocks | None] = [
            None
        ] * NUM_THREADS  # the fetch of each thread
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name="kv-fetches", daemon=True)
            for index in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def set_groups(self, groups: GroupList) -> None:
        """Replace the list of groups. Fetches are allowed from each listed prefill group whose
        blocks this group can read.

        Calls can arrive in any order. Of all lists, the list with the highest version is used.
        """
        prefill = [each for each in groups.groups if each.prefill_from]
        offers = {each.name: each.blocks for each in prefill if each.blocks is not None}
        offers.pop(self._group, None)
        sources = {n: source for n, source in offers.items() if source.identity == self._identity}
        others = offers.keys() - sources.keys()
        with self._guard:
            if groups.version < self._version:
                return
            new, self._others = others - self._others, others
            self._version, self._sources = groups.version, sources
        for name in sorted(new):
            logger.warning(
                "no KV blocks are fetched from group %s: its files of the model (names, "
                "sizes, times) or its settings are not those of this group",
                name,
            )

    def ways_from(
        self, group: str | BlockSource, is_wanted: Callable[[], bool]
    ) -> tuple[FetchBlocks | None, Source | None]:
        """Return two values. The first value is a function that fetches blocks from ``group`` to
        this node; None if this node needs no file of that group. The second value is the source
        from which the other nodes of this group fetch blocks. Both values are None if no blocks can
        be fetched from ``group``.

        Args:
            group: name of the group that has computed the blocks. For a group of another service,
                this argument is the ``BlockSource`` of that group.
            is_wanted: a function that returns whether the request still waits for the fetch.
        """
        source = self._sources.get(group) if isinstance(group, str) else self._of_peer(group)
        if source is None:
            return None, None
        message = msgspec.msgpack.encode(source)
        return self.fetch_of(source, is_wanted), Source(message, is_wanted)

    def _of_peer(self, source: BlockSource) -> BlockSource | None:
        """Return ``source``, a group of another service. Return None if that group has other files
        of the model, or other settings, than this group.
        """
        if source.identity == self._identity:
            return source
        self._warn_once(
            "no KV blocks are fetched from another service: its files of the model (names, sizes, "
            "times) or its settings are not those of this service"
        )
        return None

    def decode_source(self, message: bytes) -> BlockSource | None:
        """Return the source that a message of the group's engine contains. Return None if the
        message is empty, or if the source has other files of the model than this node.
        """
        if not message:
            return None
        source = msgspec.msgpack.decode(message, type=BlockSource)
        if source.identity == self._identity:
            return source
        self._warn_once(
            "no KV blocks are fetched to this node: its files of the model (names, sizes, times) "
            "are not those of the engine's node"
        )
        return None

    def _warn_once(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.add(text)
            logger.warning(text)

    def fetch_of(self, source: BlockSource, is_wanted: Callable[[], bool]) -> FetchBlocks | None:
        """Return a function that fetches blocks from a source; None if there is nothing to fetch.

        Args:
            is_wanted: a function that returns whether the request still waits. If the function
                returns False, the fetch ends.
        """
        return partial(self._begin, source, is_wanted) if self._ways(source) else None

    def _ways(self, source: BlockSource) -> list[Endpoints]:
        """Return, for each route to a source, the nodes from which files are read. If several nodes
        have a file, a node from which few fetches read now is chosen.
        """
        nodes = [address.node_id for address in source.addresses]
        # Nothing is fetched from the node ``here``, because all groups on a node share their files.
        here = nodes.index(self._node_id) if self._node_id in nodes else None
        load = partial(self._load, source)
        found = routes(
            source.place, source.holders, self._places, here=here, turn=self._turn, load=load
        )
        return [way for way in (self._resolve(source, each) for each in found) if way is not None]

    def _load(self, source: BlockSource, node: int) -> int:
        """Return how many fetches read files from a node. If nothing can be fetched from the node
        now, return a number that is larger than the number of all fetches.
        """
        try:
            url = source.addresses[node].seen_from(self._node_id).url
        except PlacementError:  # the node expects only peers on its own node
            return NUM_THREADS + 1
        if self._clock() < self._paused.get(url, 0.0):
            return NUM_THREADS + 1
        running = [fetch for fetch in self._running if fetch is not None]
        return sum(any(url in _urls(way) for way in fetch.ways) for fetch in running)

    def _resolve(self, source: BlockSource, route: Route) -> Endpoints | None:
        """Return the endpoints of the nodes of a route; None if one of these nodes cannot be
        reached from this node.
        """
        try:
            at = {node: source.addresses[node].seen_from(self._node_id) for node in route.nodes}
        except PlacementError:  # the node expects only peers on its own node
            return None
        parts: dict[FileKind, dict[int, int | None]]
        parts = {"block": route.blocks, "state": route.states}
        return {
            kind: {place: None if node is None else at[node] for place, node in part.items()}
            for kind, part in parts.items()
        }

    def _begin(
        self,
        source: BlockSource,
        is_wanted: Callable[[], bool],
        names: Sequence[BlockHash],
        depth: int,
    ) -> Answer[bool]:
        if self._hangs():
            return lambda: True
        fetch = _MissingBlocks(source, names, depth, is_wanted, self._clock() + QUEUE_S)
        self._fetches.put(fetch)
        return partial(self._has_ended, fetch)

    def _has_ended(self, fetch: _MissingBlocks) -> bool | None:
        # After the deadline, the request stops waiting, because the thread may hang in a file
        # system.
        if self._clock() > fetch.deadline_s:
            self._count_failure()
            return True
        return fetch.done.is_set() or None

    def _count_failure(self) -> None:
        with self._guard:
            self.counts.failures += 1

    def _hangs(self) -> bool:
        """Whether all threads hang in a file system. In this case, no new fetch may be queued,
        because no thread would run the fetch.
        """
        late_s = self._clock() - SILENCE_S
        return all(each is not None and late_s > each.deadline_s for each in self._running)

    def close(self, timeout_s: float = SILENCE_S) -> None:
        """End the threads. Each thread may still finish the file that it is fetching."""
        self._is_closing = True
        for _ in self._threads:
            self._fetches.put(None)
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    # ---- the threads

    def _serve(self, index: int) -> None:
        with make_context() as context:
            while (fetch := self._fetches.get()) is not None:
                self._running[index] = fetch
                try:
                    self._run(context, fetch)
                except Exception:  # the group then computes the tokens itself
                    logger.exception("fetching KV blocks failed")
                self._running[index] = None
                fetch.done.set()

    def _run(self, context: Context, fetch: _MissingBlocks) -> None:
        with self._guard:  # each thread must see the routes that other threads have chosen
            fetch.ways = [way for way in self._ways(fetch.source) if not self._is_paused(way)]
        if not fetch.ways or not self._goes_on(fetch):
            return
        fetch.deadline_s = self._clock() + LIMIT_S
        files, count = self._files_at(fetch.source.place), 0
        for way in fetch.ways:
            try:
                token = fetch.source.token or self._token
                links = SourceLinks(context, way, token, SILENCE_S, self._reader)
                with closing(links):
                    count += self._read(links, fetch, way, files, count)
            except SourceError as e:
                self._pause(e.url)
                self._count_failure()
                event(logger, "kv_source_silent", logging.WARNING, cause=str(e), pause_s=PAUSE_S)
            if count == len(fetch.names) or not self._goes_on(fetch):
                return

    def _pause(self, url: str) -> None:
        now_s = self._clock()
        # Pauses that have ended are removed. Otherwise old pauses would fill the memory in the long
        # run, because new groups have new URLs.
        self._paused = {each: end_s for each, end_s in self._paused.items() if end_s > now_s}
        self._paused[url] = now_s + PAUSE_S

    def _is_paused(self, way: Endpoints) -> bool:
        return any(self._clock() < self._paused.get(url, 0.0) for url in _urls(way))

    def _read(
        self,
        links: SourceLinks,
        fetch: _MissingBlocks,
        way: Endpoints,
        files: Mapping[FileKind, Sequence[KVTiers]],
        first: int,
    ) -> int:
        """Fetch the blocks from index ``first`` on by the route ``way``. After the fetch, count the
        consecutive blocks from ``first`` on that have all their files on this node. Return this
        count.
        """
        blocks, states = (
            {place: files[kind][place] for place in sorted(way[kind])}
            for kind in ("block", "state")
        )
        names, depth = fetch.names[first:], fetch.depth + first
        # With recurrent state, a request starts from a checkpoint, so blocks after the last
        # checkpoint are not needed.
        wanted = self._copy_state(links, fetch, states, names, depth)
        count = self._copy(links, fetch, "block", blocks, names[:wanted], depth)
        if count < wanted:
            self._copy_state(links, fetch, states, names[:count], depth)
        return count

    def _files_at(self, place: CachePlace) -> dict[FileKind, list[KVTiers]]:
        """Return this node's folders for the files of a source. ``place`` defines how these files
        divide blocks into parts. The first index of the result is the kind of the files. The second
        index is the index of the part of the cache.
        """
        if place not in self._files:
            # The model's files may have been replaced since the start. So the identity that was
            # computed at the start is used.
            self._files[place] = tiers_of(self._config, place, self._identity)
        return self._files[place]

    def _goes_on(self, fetch: _MissingBlocks) -> bool:
        is_late = self._clock() > fetch.deadline_s
        return not (is_late or self._is_closing) and fetch.is_wanted()

    def _copy_state(
        self,
        links: SourceLinks,
        fetch: _MissingBlocks,
        places: Mapping[int, KVTiers],
        names: Sequence[BlockHash],
        depth: int,
    ) -> int:
        """Fetch the last checkpoint that the source has for these blocks. Return the number of
        blocks up to this checkpoint. If the model has no recurrent state, there are no checkpoints,
        and the number of all blocks is returned.
        """
        count = len(names)
        while count and places and self._goes_on(fetch):
            last = count - 1
            if self._copy(links, fetch, "state", places, [names[last]], depth + last):
                break
            count = last
        return count

    def _copy(
        self,
        links: SourceLinks,
        fetch: _MissingBlocks,
        kind: FileKind,
        places: Mapping[int, KVTiers],
        names: Sequence[BlockHash],
        depth: int,
    ) -> int:
        """Fetch the files of blocks that this node lacks, until a fetch fails. Return how many
        consecutive blocks, from the first block on, have all their files on this node.

        Each file contains one part of one block. The file of the first part is fetched last. A
        look-up checks only this file, so a look-up finds only blocks that have all their files.

        Args:
            places: this node's folders for files. The keys are the indices of the parts of a block
                that this node needs.
        """
        missing = (
            FileKey(position, place)
            for position, name in enumerate(names)
            for place, files in reversed(list(places.items()))
            if not files.has_first(name)
        )
        first = min(places, default=None)
        for key, file in links.read_all(kind, names, missing):
            if not file or not self._goes_on(fetch):
                return key.position
            if not places[key.place].add_file(names[key.position], file, depth + key.position):
                logger.warning("a KV block from another node is not kept")
                return key.position
            with self._guard:
                self.counts.num_bytes += len(file)
                self.counts.blocks += kind == "block" and key.place == first
        return len(names)


def _urls(way: Endpoints) -> set[str]:
    return {each.url for part in way.values() for each in part.values() if each is not None}
