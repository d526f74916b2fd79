"""Files of KV blocks of groups whose workers are on several nodes. In these tests, each node is a
folder.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from dist_aclgraph.actors.wire import block_fetches
from dist_aclgraph.actors.wire.addresses import Listener, Place
from dist_aclgraph.actors.wire.block_fetches import BlockFetches
from dist_aclgraph.actors.wire.block_server import (
    BlockServer,
    BlockSource,
    FileKind,
    NodeServer,
    source_of,
    tiers_of,
)
from dist_aclgraph.actors.worker.node_files import NodeFiles, NodeFilesSettings
from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.config import Config, make_config
from dist_aclgraph.errors import PlacementError
from dist_aclgraph.kv.block_files import BLOCK_AGE_S
from dist_aclgraph.kv.group_files import GroupFiles
from dist_aclgraph.kv.look_ups import FetchBlocks
from dist_aclgraph.kv.tiers import CachePlace, KVTiers, cache_identity
from dist_aclgraph.steps.copies import CopyJob
from tests.actors.fetched_files import MODEL, NAMES, SIZE, TOKEN, WAIT_S
from tests.actors.kv_sockets import LOOPBACK
from tests.actors.leftovers import wait_until

FIRST = CachePlace(num_heads=2, num_kv_heads=2, num_ranks=2)
HALVES = (FIRST, replace(FIRST, heads=1, rank=1))
WHOLE = CachePlace(num_kv_heads=2)


def contents(name: bytes, place: CachePlace) -> bytes:
    return (name + bytes([place.heads])) * (SIZE // 17)


class Node:
    """A node with its own files, and optionally a server that sends these files to other nodes."""

    def __init__(self, folder: Path, node_id: str) -> None:
        path = folder / node_id
        path.mkdir()
        self.node_id, self._path = node_id, path
        kv = {"host_path": str(path), "host_gib": 0.01}
        self.config: Config = make_config({"model": str(MODEL), "kv": kv})
        self.server: BlockServer | None = None

    def serve(self, place: CachePlace) -> BlockServer:
        at = Place(self.node_id, str(self._path), LOOPBACK)
        self.server = BlockServer(at, TOKEN, tiers_of(self.config, place))
        return self.server

    def tiers(self, place: CachePlace, kind: FileKind = "block") -> KVTiers:
        states = KVTiers.open_states(self.config, place)
        return states if kind == "state" and states else KVTiers.open(self.config, place)

    def write(
        self, place: CachePlace, names: Sequence[bytes] = NAMES, kind: FileKind = "block"
    ) -> None:
        tiers = self.tiers(place, kind)
        assert all(tiers.write(name, memoryview(contents(name, place))) for name in names)

    def found(self, place: CachePlace, kind: FileKind = "block") -> list[bytes]:
        """Return the names of the files at ``place`` that are complete."""
        room, tiers = memoryview(bytearray(len(contents(NAMES[0], place)))), self.tiers(place, kind)
        return [
            name
            for name in NAMES
            if tiers.read(name, room, [len(room)]) and room == contents(name, place)
        ]


class World:
    """The nodes "a" to "d". Some of these nodes form a source."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 100.0
        self.nodes = {node_id: Node(folder, node_id) for node_id in "abcd"}
        self._fetches: list[BlockFetches] = []
        self._files: list[NodeFiles] = []

    def source(self, places: tuple[CachePlace, ...], node_ids: str) -> BlockSource:
        """Return a source. Worker i has ``places[i]``, on the node ``node_ids[i]``."""
        files = GroupFiles(places, tuple(node_ids))
        addresses = [self.nodes[node_id].serve(places[0]).address for node_id in files.nodes]
        identity = cache_identity(self.nodes["a"].config)
        return BlockSource(tuple(addresses), identity, places[0], files.holders)

    def fetches(self, node_id: str, places: Sequence[CachePlace], turn: int = 0) -> BlockFetches:
        config = self.nodes[node_id].config
        made = BlockFetches(config, node_id, TOKEN, places, turn=turn, clock=lambda: self.now_s)
        self._fetches.append(made)
        return made

    def node_files(self, node_id: str, places: Sequence[CachePlace], **changes: Any) -> NodeFiles:
        settings = NodeFilesSettings(
            node_id, LOOPBACK, TOKEN, tuple(places), 1, finds=True, fetches=True, serves=False
        )
        made = NodeFiles(self.nodes[node_id].config, replace(settings, **changes))
        self._files.append(made)
        return made

    def close(self) -> None:
        for each in (*self._fetches, *self._files):
            each.close(WAIT_S)
        for node in self.nodes.values():
            if node.server is not None:
                node.server.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(block_fetches, "SILENCE_S", WAIT_S)  # slow sources are not silent
    made = World(tmp_path)
    yield made
    made.close()


def run(begin: FetchBlocks | None, names: Sequence[bytes] = NAMES) -> None:
    assert begin is not None, "there is nothing to fetch"
    ended = begin(names, 0)
    wait_until(lambda: bool(ended()), "the fetch does not end")


def wanted() -> bool:
    return True


def test_each_node_fetches_its_own_parts_from_the_node_that_has_them(world: World) -> None:
    source = world.source(HALVES, "ab")
    for node_id, place in zip("ab", HALVES, strict=True):
        world.nodes[node_id].write(place)
    for node_id, place in zip("cd", HALVES, strict=True):
        run(world.fetches(node_id, [place]).fetch_of(source, wanted))
        assert [world.nodes[node_id].found(each) == NAMES for each in HALVES] == [
            each == place for each in HALVES
        ]


def test_a_group_on_one_node_fetches_from_all_nodes_of_a_group(world: World) -> None:
    source = world.source(HALVES, "ab")
    world.nodes["a"].write(HALVES[0])
    world.nodes["b"].write(HALVES[1], NAMES[:4])
    fetches = world.fetches("c", [WHOLE])
    run(fetches.fetch_of(source, wanted))
    assert world.nodes["c"].found(HALVES[0])[:4] == world.nodes["c"].found(HALVES[1]) == NAMES[:4]
    assert world.nodes["c"].tiers(WHOLE).has(NAMES[3])
    assert not world.nodes["c"].tiers(WHOLE).has(NAMES[4])
    assert (fetches.counts.blocks, fetches.counts.failures) == (4, 0)


def test_a_group_on_several_nodes_fetches_from_a_group_on_one_node(world: World) -> None:
    source = world.source((WHOLE,), "a")
    world.nodes["a"].write(WHOLE)
    for node_id, place in zip("cd", HALVES, strict=True):
        run(world.fetches(node_id, [place]).fetch_of(source, wanted))
        assert world.nodes[node_id].found(WHOLE) == NAMES, "each node needs a part of each block"


def test_a_lost_node_is_left_alone_and_the_other_nodes_are_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = world.source(HALVES, "ab")
    world.nodes["a"].write(HALVES[0])
    world.nodes["b"].write(HALVES[1])
    lost = world.nodes["b"].server
    assert lost is not None
    lost.close()
    both, left = world.fetches("c", [WHOLE]), world.fetches("d", [HALVES[0]])
    with monkeypatch.context() as patch:
        patch.setattr(block_fetches, "SILENCE_S", 0.2)
        run(both.fetch_of(source, wanted))
        run(both.fetch_of(source, wanted))
    assert both.counts.failures == 1, "the lost node is asked once"
    assert not world.nodes["c"].tiers(WHOLE).has(NAMES[0])
    run(left.fetch_of(source, wanted))
    assert world.nodes["d"].found(HALVES[0]) == NAMES


def test_blocks_are_found_on_the_nodes_of_any_data_parallel_rank(world: World) -> None:
    """A reader does not know which data-parallel rank computed a prompt, so the reader looks up
    blocks of all ranks.
    """
    source = world.source((WHOLE,), "ab")
    world.nodes["a"].write(WHOLE, NAMES[:2])
    world.nodes["b"].write(WHOLE, NAMES[1:])
    fetches = world.fetches("c", [WHOLE])
    run(fetches.fetch_of(source, wanted))
    assert world.nodes["c"].found(WHOLE) == NAMES
    assert (fetches.counts.blocks, fetches.counts.failures) == (len(NAMES), 0)


def test_a_lost_node_of_one_data_parallel_rank_does_not_end_the_fetch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = world.source((WHOLE,), "ab")
    world.nodes["b"].write(WHOLE)
    lost = world.nodes["a"].server
    assert lost is not None
    lost.close()
    links, fetches = block_fetches.SourceLinks, world.fetches("c", [WHOLE])

    def links_of(context: Any, way: Any, token: str, silence_s: float, reader: Any) -> Any:
        urls = {endpoint.url for endpoint in way["block"].values()}
        gone = source.addresses[0].seen_from("c").url in urls
        return links(context, way, token, 0.2 if gone else WAIT_S, reader)

    monkeypatch.setattr(block_fetches, "SourceLinks", links_of)
    run(fetches.fetch_of(source, wanted))
    assert world.nodes["c"].found(WHOLE) == NAMES
    assert fetches.counts.failures == 1


def test_files_of_a_common_node_are_not_sent(world: World) -> None:
    source = world.source(HALVES, "ab")
    for node_id, place in zip("ab", HALVES, strict=True):
        world.nodes[node_id].write(place)
    assert world.fetches("a", HALVES[:1]).fetch_of(source, wanted) is None
    fetches = world.fetches("a", HALVES)
    world.nodes["a"].tiers(HALVES[0]).delete(NAMES[3])
    run(fetches.fetch_of(source, wanted))
    assert world.nodes["a"].found(HALVES[1])[:3] == NAMES[:3], "the second half is on another node"
    assert NAMES[3] not in world.nodes["a"].found(HALVES[0]), "a node asks itself for nothing"


def test_states_come_from_the_nodes_of_their_ranks(world: World) -> None:
    halves = tuple(replace(place, has_state=True) for place in HALVES)
    source = world.source(halves, "ab")
    for node_id, place in zip("ab", halves, strict=True):
        world.nodes[node_id].write(place)
        world.nodes[node_id].write(place, [NAMES[3]], "state")
    run(world.fetches("d", halves[1:]).fetch_of(source, wanted))
    assert world.nodes["d"].found(halves[1]) == NAMES[:4]
    assert world.nodes["d"].found(halves[1], "state") == [NAMES[3]]
    assert world.nodes["d"].found(halves[0], "state") == []


# ---- the worker that sends the files of its node


def job(
    number: int,
    source: BlockSource | None = None,
    names: Sequence[bytes] = NAMES,
    first: int = 0,
) -> CopyJob:
    message = b"" if source is None else msgspec.msgpack.encode(source)
    depths = pack_ints(range(first, first + len(names)))
    return CopyJob(number, "find", b"", b"".join(names), depths, source=message)


def answer(files: NodeFiles, *jobs: CopyJob) -> dict[int, int]:
    """Wait for the answers to all jobs, and return them."""
    found, end_s = dict(files.advance(jobs)), time.monotonic() + WAIT_S
    while len(found) < len(jobs):
        assert time.monotonic() < end_s, "a look-up does not end"
        time.sleep(0.001)
        found |= dict(files.advance(()))
    return found


def test_a_worker_counts_the_files_of_its_node(world: World) -> None:
    files = world.node_files("c", HALVES[1:])
    world.nodes["c"].write(HALVES[1], NAMES[:4])
    jobs = (job(5), job(6, names=NAMES[1:]), job(7, names=NAMES[4:]))
    assert answer(files, *jobs) == {5: 4, 6: 3, 7: 0}
    assert files.server is None and files.fetched["blocks"] == 0


def test_a_worker_fetches_what_its_node_lacks(world: World) -> None:
    source = world.source(HALVES, "ab")
    world.nodes["b"].write(HALVES[1], NAMES[:5])
    files = world.node_files("d", HALVES[1:])
    world.nodes["d"].write(HALVES[1], NAMES[:2])
    assert answer(files, job(1, source), job(2)) == {1: 5, 2: 2}
    assert world.nodes["d"].found(HALVES[1]) == NAMES[:5]
    assert files.fetched["num_bytes"] > 0 and files.fetched["blocks"] == 3
    assert answer(files, job(3)) == {3: 5}


def test_fetched_blocks_of_a_long_prompt_are_deleted_before_the_blocks_of_its_beginning(
    world: World,
) -> None:
    """Blocks at the prompt's end get an earlier time of use than blocks at its beginning."""
    source, first = world.source(HALVES, "ab"), 1000
    world.nodes["b"].write(HALVES[1])
    files, began_s = world.node_files("d", HALVES[1:]), time.time()
    assert answer(files, job(1, source, first=first)) == {1: len(NAMES)}
    for depth, name in enumerate(NAMES, first):
        path = world.nodes["d"].tiers(HALVES[1])._first.path_of(name)
        used_s = path.stat().st_mtime + depth * BLOCK_AGE_S
        assert began_s - 1 < used_s < time.time() + 1, "the time of the fetch"


def test_a_worker_with_other_files_of_the_model_fetches_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    source = msgspec.structs.replace(world.source(HALVES, "ab"), identity="other files")
    world.nodes["b"].write(HALVES[1])
    files = world.node_files("d", HALVES[1:])
    assert answer(files, job(1, source), job(2, source)) == {1: 0, 2: 0}
    assert caplog.text.count("no KV blocks are fetched to this node") == 1


def test_a_worker_sends_files_of_its_node(world: World) -> None:
    """One worker on each node runs the server that sends this node's files."""
    sends = world.node_files("b", HALVES[1:], finds=False, serves=True)
    assert sends.server is not None and answer(sends, job(1)) == {1: 0}
    source = world.source(HALVES, "a")
    first = NodeServer(source.addresses[0], source.identity)
    source = source_of([first, sends.server], GroupFiles(HALVES, ("a", "b")))
    assert source is not None
    world.nodes["b"].write(HALVES[1])
    quiet = Mock(side_effect=AssertionError("nobody has fetched a file"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockServer, "wait_until_quiet", quiet)
        sends.wait_until_quiet(WAIT_S)
        assert answer(world.node_files("d", HALVES[1:]), job(2, source)) == {2: len(NAMES)}
        with pytest.raises(AssertionError):
            sends.wait_until_quiet(WAIT_S)


def test_nothing_is_fetched_from_a_group_whose_nodes_have_different_files_of_the_model(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The fetched KV might come from other weights than the weights of this group, and later
    prompts would use this wrong KV.
    """
    at = world.source(HALVES, "ab").addresses
    servers = [NodeServer(at[0], "old weights"), NodeServer(at[1], "new weights")]
    files = GroupFiles(HALVES, ("a", "b"))
    assert source_of(servers, files) is None
    assert "no other group fetches KV blocks from this group" in caplog.text
    source = source_of([servers[0], servers[1]._replace(identity="old weights")], files)
    assert source == BlockSource(at, "old weights", FIRST, files.holders)


@pytest.mark.parametrize("opens", [True, False])
def test_a_worker_that_joins_another_group_keeps_no_threads(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: bool
) -> None:
    """The file server's threads end. In one case, the server has found no free port on the node."""
    node, others = world.nodes["d"], set(threading.enumerate())

    def new_threads() -> set[str]:
        names = {thread.name for thread in set(threading.enumerate()) - others}
        return {name for name in names if name.startswith("kv-")}

    disk = {"disk": str(tmp_path / "disk"), "disk_gib": 0.01}
    node.config = node.config.model_copy(update={"kv": node.config.kv.model_copy(update=disk)})
    if opens:
        files = world.node_files("d", HALVES[1:], serves=True)
        assert new_threads() == {"kv-look-ups", "kv-fetches", "kv-server"}
        files.close(WAIT_S)
    else:
        with monkeypatch.context() as patch, pytest.raises(PlacementError):
            patch.setattr(Listener, "bind", Mock(side_effect=PlacementError("no port is free")))
            world.node_files("d", HALVES[1:], serves=True)
    wait_until(lambda: not new_threads(), lambda: f"{new_threads()} do not end", WAIT_S)


@pytest.mark.parametrize("way", ["forget", "cancel"])
def test_look_ups_that_are_dropped_get_no_answer_and_end_their_fetches(
    world: World, way: str
) -> None:
    source = world.source(HALVES, "ab")
    files = world.node_files("d", HALVES[1:])
    looks: list[Callable[[], bool]] = []
    begin = BlockFetches.fetch_of

    def fetch_of(fetches: BlockFetches, source: BlockSource, is_wanted: Callable[[], bool]) -> Any:
        looks.append(is_wanted)
        return begin(fetches, source, is_wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockFetches, "fetch_of", fetch_of)
        patch.setattr(BlockServer, "_answer", lambda *_: None)
        assert files.advance([job(1, source)]) == [] and looks[0]()
        if way == "forget":
            files.forget()
        else:
            assert files.advance([CopyJob(1, "cancel", b"", b"", b"")]) == []
        assert not looks[0]() and files.advance([]) == []
