"""BlockFetches: fetches files of KV blocks from the nodes of other groups.

A few threads copy files into the first tier of this node. A file gets its final name when it is
complete. From then on, requests find the file in the same way as a file that was written on this
node. If a fetch fails, more tokens of the prompt are computed. No request waits longer than
``QUEUE_S`` plus ``LIMIT_S``.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec
import zmq

from dist_aclgraph.actors.wire.addresses import Endpoint
from dist_aclgraph.actors.wire.block_server import WINDOW, BlockSource, FileKind, ReadFile, tiers_of
from dist_aclgraph.actors.wire.context import Context, make_context
from dist_aclgraph.actors.wire.messages import GroupList
from dist_aclgraph.actors.wire.sockets import MAX_MESSAGE_BYTES, read_frame
from dist_aclgraph.config import Config
from dist_aclgraph.errors import NotAMessageError, PlacementError
from dist_aclgraph.kv.checkpoints import BlockHash
from dist_aclgraph.kv.look_ups import Answer, FetchBlocks
from dist_aclgraph.kv.tiers import CachePlace, KVTiers, cache_identity
from dist_aclgraph.logs import event

QUEUE_S = 5.0  # maximum time that a request waits for a free thread
LIMIT_S = 20.0  # maximum time of a fetch, from its beginning until the request runs
SILENCE_S = 3.0  # a source that sends no file for this time counts as silent
PAUSE_S = 30.0  # after a source was silent, nothing is fetched from it for this time
NUM_THREADS = 2

logger = logging.getLogger(__name__)
_numbers = msgspec.msgpack.Decoder(int)


@dataclass
class FetchCounts:
    """Counts since the start of an engine."""

    blocks: int = 0
    num_bytes: int = 0
    # Fetches whose source was silent or sent no valid answer, and fetches that took too long.
    failures: int = 0


@dataclass
class _Fetch:
    """The blocks that a request lacks.

    Attributes:
        names: the hashes of the blocks, in the order of the prompt.
        depth: number of blocks before the first of these blocks in the prompt.
        is_wanted: returns whether the request still waits.
        deadline_s: when the request stops waiting, for a thread or for the end of the fetch.
    """

    endpoint: Endpoint
    place: CachePlace
    names: Sequence[BlockHash]
    depth: int
    is_wanted: Callable[[], bool]
    deadline_s: float
    done: threading.Event = field(default_factory=threading.Event)


class _Key(NamedTuple):
    """Identifies a file by the index of its block in the names of a fetch, and by its place."""

    position: int
    place: int


class _SourceError(Exception):
    """A source has sent no file in time, or has sent an invalid answer."""


class BlockFetches:
    """Owns the threads, and knows the groups from which files can be fetched. Any thread may call
    the methods.

    Args:
        node_id: Ray's id of this node.
        token: the deployment's token.
        group: name of this engine's group, from which nothing is fetched.
    """

    def __init__(
        self,
        config: Config,
        node_id: str,
        token: str,
        group: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._identity = cache_identity(config)
        self._node_id = node_id
        self._token = token
        self._group = group
        self._clock = clock
        self._version = 0  # version of the group list that named these sources
        self._sources: dict[str, BlockSource] = {}
        self._others: set[str] = set()  # groups whose blocks this group cannot read
        self._paused: dict[str, float] = {}  # for each URL, the end of the pause after a failure
        self._files: dict[CachePlace, dict[FileKind, list[KVTiers]]] = {}
        self._is_closing = False
        self._guard = threading.Lock()  # guards ``counts`` and the sources
        self.counts = FetchCounts()
        self._fetches: queue.SimpleQueue[_Fetch | None] = queue.SimpleQueue()
        self._running: list[_Fetch | None] = [None] * NUM_THREADS  # the fetch of each thread
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name="kv-fetches", daemon=True)
            for index in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def set_groups(self, groups: GroupList) -> None:
        """Let blocks be fetched from the groups in the list whose blocks this group can read.

        Calls can arrive in any order: the list with the highest version is used.
        """
        offers = {each.name: each.blocks for each in groups.groups if each.blocks is not None}
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

    def fetch_from(self, group: str, is_wanted: Callable[[], bool]) -> FetchBlocks | None:
        """Return a function that fetches blocks from a group; None if the group has no source.

        Args:
            is_wanted: returns whether the request still waits; if not, the fetch ends.
        """
        source = self._sources.get(group)
        # Groups of one node have the same files.
        if source is None or source.address.node_id == self._node_id:
            return None
        try:
            endpoint = source.address.seen_from(self._node_id)
        except PlacementError:  # the group's engine can only be reached on its own node
            return None
        return partial(self._begin, endpoint, source.place, is_wanted)

    def _begin(
        self,
        endpoint: Endpoint,
        place: CachePlace,
        is_wanted: Callable[[], bool],
        names: Sequence[BlockHash],
        depth: int,
    ) -> Answer[bool]:
        if self._hangs():
            return lambda: True
        deadline_s = self._clock() + QUEUE_S
        fetch = _Fetch(endpoint, place, names, depth, is_wanted, deadline_s)
        self._fetches.put(fetch)
        return partial(self._has_ended, fetch)

    def _has_ended(self, fetch: _Fetch) -> bool | None:
        # After the deadline, do not wait for the thread, because it may hang in a file system.
        if self._clock() > fetch.deadline_s:
            self._count_failure()
            return True
        return fetch.done.is_set() or None

    def _count_failure(self) -> None:
        with self._guard:
            self.counts.failures += 1

    def _hangs(self) -> bool:
        """Whether all threads hang in a file system. Then requests would wait in vain, and fetches
        would fill the queue.
        """
        late_s = self._clock() - SILENCE_S
        return all(each is not None and late_s > each.deadline_s for each in self._running)

    def close(self, timeout_s: float = SILENCE_S) -> None:
        """Let the threads end after at most one further file."""
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
                except Exception:  # the engine then computes the tokens itself
                    logger.exception("fetching KV blocks failed")
                self._running[index] = None
                fetch.done.set()

    def _run(self, context: Context, fetch: _Fetch) -> None:
        url = fetch.endpoint.url
        if self._clock() < self._paused.get(url, 0.0) or not self._goes_on(fetch):
            return
        fetch.deadline_s = self._clock() + LIMIT_S
        files = self._files_at(fetch.place)
        try:
            with closing(_Link(context, fetch.endpoint, self._token)) as link:
                # With recurrent state, a request starts from a checkpoint, so blocks after the last
                # checkpoint are not needed.
                wanted = self._copy_state(link, fetch, files["state"], len(fetch.names))
                names = fetch.names[:wanted]
                count = self._copy(link, fetch, "block", files["block"], names, fetch.depth)
                if count < wanted:
                    self._copy_state(link, fetch, files["state"], count)
        except _SourceError as e:
            self._paused[url] = self._clock() + PAUSE_S
            self._count_failure()
            event(logger, "kv_source_silent", logging.WARNING, cause=str(e), pause_s=PAUSE_S)

    def _files_at(self, place: CachePlace) -> dict[FileKind, list[KVTiers]]:
        """Return this node's folders for files that have the source's layout."""
        if place not in self._files:
            # The engine's own identity is used, because the model's files may have been replaced
            # since the engine started.
            self._files[place] = tiers_of(self._config, place, self._identity)
        return self._files[place]

    def _goes_on(self, fetch: _Fetch) -> bool:
        is_late = self._clock() > fetch.deadline_s
        return not (is_late or self._is_closing) and fetch.is_wanted()

    def _copy_state(self, link: _Link, fetch: _Fetch, places: Sequence[KVTiers], count: int) -> int:
        """Fetch the last checkpoint that the source has for the first ``count`` blocks; return the
        number of blocks up to this checkpoint. Without recurrent state, return ``count``.
        """
        while count and places and self._goes_on(fetch):
            last = count - 1
            if self._copy(link, fetch, "state", places, [fetch.names[last]], fetch.depth + last):
                break
            count = last
        return count

    def _copy(
        self,
        link: _Link,
        fetch: _Fetch,
        kind: FileKind,
        places: Sequence[KVTiers],
        names: Sequence[BlockHash],
        depth: int,
    ) -> int:
        """Fetch the files of blocks that are missing on this node, until a fetch fails. Return the
        number of leading blocks that have all files.

        The first worker's file of a block is fetched last. Look-ups check only this file, so they
        find only blocks that have all files.
        """
        missing = (
            _Key(position, place)
            for position, name in enumerate(names)
            for place, files in reversed(list(enumerate(places)))
            if not files.has_first(name)
        )
        for key, file in link.read_all(kind, names, missing):
            if not file or not self._goes_on(fetch):
                return key.position
            if not places[key.place].add_file(names[key.position], file, depth + key.position):
                logger.warning("a KV block from %s is not kept", fetch.endpoint.url)
                return key.position
            with self._guard:
                self.counts.num_bytes += len(file)
                self.counts.blocks += kind == "block" and key.place == 0
        return len(names)


class _Link:
    """A connection to a source, for one fetch."""

    def __init__(self, context: Context, endpoint: Endpoint, token: str) -> None:
        self._token = token
        self._next = 0  # number of the next request
        self._last = -1  # number of the last answer
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        endpoint.connect(self._socket)

    def close(self) -> None:
        self._socket.close()

    def read_all(
        self, kind: FileKind, names: Sequence[BlockHash], keys: Iterable[_Key]
    ) -> Iterator[tuple[_Key, memoryview]]:
        """Yield the files in order; a missing file is empty.

        At most ``WINDOW`` requests wait for answers at the same time.

        Raises:
            _SourceError: the source refuses the connection, no file has arrived in time, or an
                answer is not valid.
        """
        asked: list[tuple[_Key, int]] = []
        for key in keys:
            request = ReadFile(self._token, self._next, kind, key.place, names[key.position])
            try:
                self._socket.send(msgspec.msgpack.encode(request), zmq.NOBLOCK)
            except zmq.Again:  # not a full queue, but a failed handshake
                raise _SourceError("the source refuses the connection") from None
            asked.append((key, self._next))
            self._next += 1
            if len(asked) == WINDOW:
                yield self._receive(*asked.pop(0))
        for each in asked:
            yield self._receive(*each)

    def _receive(self, key: _Key, number: int) -> tuple[_Key, memoryview]:
        frame = memoryview(b"")
        while self._last < number:  # earlier answers belong to files that are not wanted any longer
            if not self._socket.poll(int(SILENCE_S * 1000)):
                raise _SourceError(f"no file has arrived within {SILENCE_S:g} s")
            # Read without a copy, because a copy of many bytes would hold Python's global lock.
            first, *rest = self._socket.recv_multipart(copy=False)
            try:
                found = read_frame(_numbers, first.bytes)
            except NotAMessageError as e:
                raise _SourceError(str(e)) from None
            if not self._last < found <= number or len(rest) != 1:
                raise _SourceError("the frames are no answer to a request")
            self._last = found
            frame = memoryview(rest[0].buffer)
        return key, frame
