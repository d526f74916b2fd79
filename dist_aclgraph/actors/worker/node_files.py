"""NodeFiles: the files of KV blocks on a node without the group's engine.

The engine of a group looks up and fetches files only on its own node. If the group has workers on
other nodes, the engine cannot access the files there. On each of these nodes, one worker of each
data-parallel rank looks up and fetches files for the rank's workers on the node. A worker can also
send the files of its node to other groups.

If ``kv.transport`` is ``hixl``, a worker manages the files on the engine's node. The engine cannot
do this work: HIXL needs a device, and the engine has no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from dist_aclgraph.actors.host.run_directory import RunDirectory
from dist_aclgraph.actors.wire.addresses import Place
from dist_aclgraph.actors.wire.block_fetches import BlockFetches
from dist_aclgraph.actors.wire.block_server import BlockServer, NodeServer, tiers_of
from dist_aclgraph.actors.wire.lent_files import LentFiles
from dist_aclgraph.actors.wire.peers import open_server
from dist_aclgraph.actors.worker.hixl_memory import HixlMemory
from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.config import Config
from dist_aclgraph.kv.block_pool import HASH_BYTES
from dist_aclgraph.kv.checkpoints import BlockHash
from dist_aclgraph.kv.look_ups import (
    Answer,
    FetchBlocks,
    count_found,
    find_or_fetch,
    look_ups_of,
)
from dist_aclgraph.kv.tiers import CachePlace, KVTiers, cache_identity
from dist_aclgraph.planning.budget import PART_BYTES
from dist_aclgraph.steps.copies import CopyJob

CLOSE_S = 5.0  # maximum wait for the end of HIXL, in seconds, if the server cannot start


@dataclass(frozen=True)
class NodeFilesSettings:
    """Settings that the controller sends to a worker that manages files on its node.

    Attributes:
        node_id: Ray's id of the node.
        host: the node's own address.
        token: the deployment's token.
        places: the parts of the KV cache that are on this node, for this worker's data-parallel
            rank (``GroupFiles.places_beside``).
        turn: index of the node among the group's nodes.
        finds: whether the worker looks up files for the workers of its data-parallel rank.
        fetches: whether the worker also fetches files from other groups, if ``finds`` is True.
        serves: whether the worker sends files to other groups.
        uses_hixl: whether files are fetched and sent over HIXL.
    """

    node_id: str
    host: str
    token: str = field(repr=False)
    places: tuple[CachePlace, ...]
    turn: int
    finds: bool
    fetches: bool
    serves: bool
    uses_hixl: bool = False


def open_hixl_memory(config: Config, settings: NodeFilesSettings) -> HixlMemory:
    """Return this worker's memory for transfers over HIXL. For the errors, see ``HixlMemory``."""
    from dist_aclgraph.device.hixl import HixlEngine, HostMemory

    memory, ports = HostMemory(2 * PART_BYTES), config.cluster.port_range
    return HixlMemory(memory, HixlEngine, settings.host, ports, config.timeouts.join_s / 2)


class NodeFiles:
    """Looks up, fetches and serves files of one node. Only the thread of the step loop may call
    ``advance`` and ``forget``.

    Args:
        open_memory: a function that opens the memory for transfers over HIXL.

    Raises:
        ConfigError: a folder cannot be created, or its file system is too small, or CANN has no
            HIXL.
        PlacementError: no port is free.
        DeviceError: HIXL cannot be used.
        WorkerError: HIXL does not answer.
    """

    def __init__(
        self,
        config: Config,
        settings: NodeFilesSettings,
        open_memory: Callable[[Config, NodeFilesSettings], HixlMemory] = open_hixl_memory,
    ) -> None:
        place, self._identity = settings.places[0], cache_identity(config)
        tiers, states = KVTiers.open(config, place), KVTiers.open_states(config, place)
        self._directory: RunDirectory | None = None
        self._server: BlockServer | None = None
        self._memory = open_memory(config, settings) if settings.uses_hixl else None
        if settings.serves:
            self._directory = RunDirectory()
            ports = config.cluster.port_range
            at = Place(settings.node_id, self._directory.path, settings.host, ports)
            lent = None if self._memory is None else LentFiles(self._memory.lender)
            try:
                files = tiers_of(config, place)
                self._server = open_server(config, at, settings.token, files, lent)
            except BaseException:
                if self._memory is not None:
                    self._memory.close(CLOSE_S)
                raise
        # The threads for look-ups and fetches are started after the server. Otherwise these threads
        # would stay alive if the server found no free port.
        self._look_ups = look_ups_of(tiers, states) if settings.finds else None
        self._fetches: BlockFetches | None = None
        if settings.finds and settings.fetches:
            self._fetches = BlockFetches(
                config,
                settings.node_id,
                settings.token,
                settings.places,
                turn=settings.turn,
                reader=self._memory,
            )
        self._answers: dict[int, Answer[int]] = {}

    @property
    def server(self) -> NodeServer | None:
        """The server from which other groups fetch the node's files; None if this worker serves no
        files.
        """
        return None if self._server is None else NodeServer(self._server.address, self._identity)

    @property
    def fetched(self) -> dict[str, int]:
        """The fields of ``FetchCounts``; empty if nothing is fetched."""
        return {} if self._fetches is None else asdict(self._fetches.counts)

    def advance(self, jobs: Sequence[CopyJob]) -> list[tuple[int, int]]:
        """Begin or cancel the look-ups that ``jobs`` names, and continue earlier look-ups. Does not
        wait for a disk or a network.

        Returns:
            One pair for each look-up that has ended: the look-up's number, and a number of leading
            blocks. All files of these blocks are on this node.
        """
        for job in jobs:
            if job.kind == "find":
                self._answers[job.number] = self._begin(job)
            else:
                self._answers.pop(job.number, None)
        found = {number: answer() for number, answer in self._answers.items()}
        ended = [(number, count) for number, count in found.items() if count is not None]
        for number, _ in ended:
            del self._answers[number]
        return ended

    def _begin(self, job: CopyJob) -> Answer[int]:
        look_ups = self._look_ups
        if look_ups is None:
            return lambda: 0
        names = [job.hashes[i : i + HASH_BYTES] for i in range(0, len(job.hashes), HASH_BYTES)]
        ask = partial(look_ups.ask, partial(count_found, names))
        fetch = self._fetch_of(job)
        return ask() if fetch is None else find_or_fetch(ask, fetch, names)

    def _fetch_of(self, job: CopyJob) -> FetchBlocks | None:
        fetches, number = self._fetches, job.number
        source = None if fetches is None else fetches.decode_source(job.source)
        if fetches is None or source is None:
            return None
        fetch = fetches.fetch_of(source, lambda: number in self._answers)
        if fetch is None:
            return None
        first = int(unpack_ints(job.depths)[0])

        def begin(names: Sequence[BlockHash], depth: int) -> Answer[bool]:
            return fetch(names, first + depth)

        return begin

    def forget(self) -> None:
        """Drop all look-ups. The engine no longer waits for their results. Fetches for these
        look-ups end.
        """
        self._answers.clear()

    def wait_until_quiet(self, timeout_s: float) -> None:
        """Wait until other groups have fetched the files that they need from this node. This is
        necessary when the group drains, because the engine's drain waits only for fetches from the
        engine's node.
        """
        if self._server is not None and self._server.was_asked:
            self._server.wait_until_quiet(timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the threads and release the port. Wait at most ``timeout_s`` for each thread. A
        thread that hangs in a file system stays until the process ends.
        """
        self.forget()
        if self._look_ups is not None:
            self._look_ups.close()
        if self._fetches is not None:
            self._fetches.close(timeout_s)
        if self._server is not None:
            self._server.close(timeout_s)
        if self._memory is not None:
            is_lent = self._server is not None and not self._server.is_closed
            self._memory.close(timeout_s, is_lent=is_lent)
        if self._directory is not None:
            self._directory.remove()
