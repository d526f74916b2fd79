"""If several nodes have the same files, a reader chooses the node that serves the fewest of the
reader's fetches, and never chooses a silent node.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dist_aclgraph.actors.wire import block_fetches
from dist_aclgraph.actors.wire.addresses import Address, Place
from dist_aclgraph.actors.wire.block_server import BlockServer, tiers_of
from dist_aclgraph.config import make_config
from dist_aclgraph.kv.group_files import GroupFiles
from dist_aclgraph.kv.tiers import CachePlace
from tests.actors.fetched_files import MODEL, NAMES, NODE, TOKEN, WAIT_S, World, contents

PLACE = CachePlace(num_ranks=2)  # a model with latents: all workers keep the same latents


class TwoNodes(World):
    """A source with a worker on each of two nodes. The second node has few of the files."""

    few = NAMES[:2]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, PLACE)
        (folder / "second").mkdir()
        kv = {"host_path": str(folder / "second"), "host_gib": 0.01}
        files = tiers_of(make_config({"model": str(MODEL), "kv": kv}), PLACE)
        self.second = BlockServer(Place(NODE, str(folder / "second")), TOKEN, files)
        self.write(*NAMES)
        for name in self.few:
            assert files["block"][0].write(name, memoryview(contents(name, 0)))
        at = self.second.address.file
        addresses = (self.address, Address("second", at, self.second.address.tcp or at))
        places = PLACE, replace(PLACE, rank=1)
        self.use(
            self.address,
            addresses=addresses,
            holders=GroupFiles(places, ("source", "second")).holders,
        )

    def close(self) -> None:
        super().close()
        self.second.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoNodes]:
    monkeypatch.setattr(block_fetches, "SILENCE_S", WAIT_S)  # long enough for a busy machine
    made = TwoNodes(tmp_path)
    yield made
    made.close()


def test_a_second_fetch_uses_the_other_node(world: TwoNodes) -> None:
    goes_on, has_begun = threading.Event(), threading.Event()

    def wait() -> bool:
        has_begun.set()
        return goes_on.wait(WAIT_S)

    first = threading.Thread(target=world.fetch, args=(NAMES, wait))
    first.start()
    assert has_begun.wait(WAIT_S)
    world.fetch()
    assert world.found() == world.few
    goes_on.set()
    first.join(WAIT_S)
    assert world.found() == NAMES


def test_another_node_is_used_while_a_node_is_silent(
    world: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.server.close()
    monkeypatch.setattr(block_fetches, "SILENCE_S", 0.05)
    world.fetch()
    assert (world.found(), world.fetches.counts.failures) == ([], 1)
    monkeypatch.setattr(block_fetches, "SILENCE_S", WAIT_S)
    world.fetch()
    assert (world.found(), world.fetches.counts.failures) == (world.few, 1)
