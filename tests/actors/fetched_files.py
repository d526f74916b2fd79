"""Files of KV blocks at a source, and an engine on another node that fetches these files."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dist_aclgraph.actors.wire.addresses import Address, Place
from dist_aclgraph.actors.wire.block_fetches import (
    BlockFetches,
)
from dist_aclgraph.actors.wire.block_server import (
    BlockServer,
    BlockSource,
    FileKind,
    tiers_of,
)
from dist_aclgraph.actors.wire.lent_files import LentFiles, MemoryReader
from dist_aclgraph.actors.wire.messages import GroupEntry, GroupList
from dist_aclgraph.config import Config, make_config
from dist_aclgraph.kv.group_files import GroupFiles
from dist_aclgraph.kv.tiers import CachePlace, cache_identity

MODEL = Path(__file__).parents[2] / "models" / "tiny-qwen3"
TOKEN, NODE, GROUP, WAIT_S = "secret", "node", "7", 60.0
PLACE = CachePlace(num_heads=2, num_kv_heads=2, num_ranks=2)
HYBRID = replace(PLACE, has_state=True)
NAMES = [bytes([number]) * 16 for number in range(1, 7)]
SIZE = 5000  # number of bytes of one worker's part of a block


def contents(name: bytes, place: int) -> bytes:
    return (name + bytes([place])) * (SIZE // 17)


def one_node(place: CachePlace) -> GroupFiles:
    """Return the files of a group whose two workers are on one node. The first worker's files are
    at ``place``.
    """
    return GroupFiles((place, replace(place, heads=1, rank=1)), ("source", "source"))


class World:
    """A source with files of two workers, and an engine on another node that lacks them.

    Attributes:
        there: the files at the source.
        here: the files at the engine that fetches.
        now_s: the time that the clock of ``fetches`` shows, in seconds; tests change it.
    """

    def __init__(
        self,
        folder: Path,
        place: CachePlace = PLACE,
        lent: LentFiles | None = None,
        reader: MemoryReader | None = None,
        peer_token: str | None = None,
        peer_key: bytes | None = None,
        **server: Any,
    ) -> None:
        self.place = place

        def configure(node: str) -> Config:
            path = folder / node
            path.mkdir()
            kv = {"host_path": str(path), "host_gib": 0.01}
            return make_config({"model": str(MODEL), "kv": kv})

        self.config = configure("there")
        self.there = tiers_of(self.config, place)
        here = configure("here")
        self.here = tiers_of(here, place)
        self.now_s = 100.0
        at = Place(NODE, str(folder), **server)
        self.server = BlockServer(at, TOKEN, self.there, lent, peer_token, peer_key)
        files = one_node(place)
        self.holders = files.holders
        self.fetches = BlockFetches(
            here,
            NODE,
            TOKEN,
            files.places_beside(0),
            reader=reader,
            clock=lambda: self.now_s,
        )
        # The test treats this address as if other nodes could reach it.
        at_file = self.server.address.file
        self.address = Address("source", at_file, self.server.address.tcp or at_file)
        self.use(self.address)

    def use(self, at: Address, **changes: Any) -> None:
        """Replace the list of groups. Engines then fetch files from the source at ``at``."""
        source = BlockSource((at,), cache_identity(self.config), self.place, self.holders)
        source = msgspec.structs.replace(source, **changes)
        entries = (
            GroupEntry("3", at, 1, 1),
            GroupEntry(GROUP, at, 1, 1, prefill_from=1, blocks=source),
        )
        self.fetches.set_groups(GroupList(1, entries))

    def write(self, *names: bytes, states: tuple[bytes, ...] = ()) -> None:
        files: dict[FileKind, tuple[bytes, ...]] = {"block": names, "state": states}
        for kind, wanted in files.items():
            for place, tiers in enumerate(self.there[kind]):
                assert all(tiers.write(name, memoryview(contents(name, place))) for name in wanted)

    def fetch(
        self,
        names: list[bytes] = NAMES,
        is_wanted: Callable[[], bool] = lambda: True,
        source: str | BlockSource = GROUP,
    ) -> None:
        fetch = self.fetches.ways_from(source, is_wanted)[0]
        assert fetch is not None
        ended, end_s = fetch(names, 0), time.monotonic() + WAIT_S
        while not ended():
            assert time.monotonic() < end_s, "the fetch does not end"
            time.sleep(0.001)

    def found(self, kind: FileKind = "block") -> list[bytes]:
        """Return the names of the files that are complete at every worker of the fetching
        engine.
        """
        room = memoryview(bytearray(len(contents(NAMES[0], 0))))
        return [
            name
            for name in NAMES
            if all(
                tiers.read(name, room, [len(room)]) and room == contents(name, place)
                for place, tiers in enumerate(self.here[kind])
            )
        ]

    def file(self, name: bytes, place: int = 0) -> Path:
        return self.there["block"][place]._first.path_of(name)

    def close(self) -> None:
        self.fetches.close()
        self.server.close()
