"""Workers of two nodes fetch files of KV blocks from each other over the emulated HIXL."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import make_config
from dist_aclgraph.planning.budget import MAX_LINKS, streams_of_links
from tests.actors.fetched_files import NAMES
from tests.actors.leftovers import wait_until
from tests.actors.listening import listening

pytestmark = pytest.mark.slow


# One transfer stalls for an hour. The time limit of 10 s is long enough for the other transfers.
STALLED = {"fault_op": "adxl_transfer", "fault_kind": "stall", "stall_s": 3600, "TRANSFER_S": 10.0}


class Node:
    """The process of ``hixl_node``."""

    def __init__(self, folder: Path, host: str, settings: dict[str, Any]) -> None:
        folder = folder / host
        folder.mkdir()
        command = ["-m", "tests.actors.hixl_node", str(folder), host, json.dumps(settings)]
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def receive(self) -> Any:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("VALUE "):
                return json.loads(line.removeprefix("VALUE "))
        raise AssertionError("the process has ended")

    def begin(self, *call: Any) -> None:
        assert self.process.stdin
        print(json.dumps(call), file=self.process.stdin, flush=True)

    def ask(self, *call: Any) -> Any:
        self.begin(*call)
        return self.receive()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


Start = Callable[..., tuple[Node, Node]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts two nodes: one has files, and the other fetches them. The
    settings apply only to the fetching node.
    """
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and int(scope.read_text()) > 1:
        pytest.skip(f"{scope} lets no process access the memory of another one")
    with ExitStack() as stack:

        def begun(num_files: int = len(NAMES), **settings: Any) -> tuple[Node, Node]:
            nodes = Node(tmp_path, "source", {}), Node(tmp_path, "reader", settings)
            for node in nodes:
                stack.callback(node.process.communicate)
                stack.callback(node.process.kill)
            for node in nodes:
                node.receive()
            nodes[0].ask("write", num_files)
            return nodes

        yield begun


def test_files_arrive_and_all_slots_and_streams_come_back(start: Start) -> None:
    source, reader = start()
    before = reader.ask("state")
    assert reader.ask("fetch", source.ask("source")) == len(NAMES)
    after, there = reader.ask("state"), source.ask("state")
    assert (after["blocks"], after["failures"], after["is_reading"]) == (len(NAMES), 0, False)
    raw = {"model": "m", "parallel": {"dp": 2, "prefill_groups": 1}}
    kv = {"host_gib": 1.0, "transport": "hixl", "closed_network": True}
    reserved = streams_of_links(make_config({**raw, "kv": kv}))
    used = before["streams"] - after["streams"] + before["streams"] - there["streams"]
    assert used * MAX_LINKS == reserved
    wait_until(lambda: not source.ask("state")["is_lending"], "the source keeps slots")

    for node in (source, reader):
        host, _, port = node.ask("state")["engine"].rpartition(":")
        found = listening({node.process.pid})
        assert (host, int(port)) in found and {address for address, _ in found} == {host}
    assert reader.ask("close") and source.ask("close")
    assert listening({reader.process.pid, source.process.pid}) == set()


def test_links_outlive_a_restart_of_both_devices(start: Start) -> None:
    source, reader = start(num_files=2)
    at = source.ask("source")
    assert reader.ask("fetch", at) == 2
    streams = reader.ask("state")["streams"]
    for node in (source, reader):
        node.ask("restart_device")
    source.ask("write")
    assert reader.ask("fetch", at) == len(NAMES)
    state = reader.ask("state")
    assert (state["failures"], state["streams"]) == (0, streams)


def test_damaged_bytes_are_not_kept(start: Start) -> None:
    source, reader = start()
    source.ask("damage")
    assert reader.ask("fetch", source.ask("source")) == 0
    state = reader.ask("state")
    assert state["num_bytes"] == 0 and not state["is_reading"]


def test_a_transfer_that_does_not_end_gives_its_slot_back_when_the_link_has_ended(
    start: Start,
) -> None:
    source, reader = start(**STALLED, fault_call=3)
    assert reader.ask("fetch", source.ask("source")) == 2
    state = reader.ask("state")
    assert (state["failures"], state["lost"], state["is_reading"]) == (1, 0, False)


def test_a_slot_is_lost_if_its_link_does_not_end(start: Start) -> None:
    """The source's process is stopped while a transfer runs, so the process cannot confirm the end
    of the link.
    """
    source, reader = start(**STALLED, fault_call=1, DISCONNECT_S=3.0)
    reader.ask("end_links_after", source.process.pid)
    reader.begin("fetch", source.ask("source"))
    wait_until(lambda: source.ask("state")["is_lending"], "nothing is lent")
    source.process.send_signal(signal.SIGSTOP)
    assert reader.receive() == 0
    state = reader.ask("state")
    assert (state["failures"], state["lost"], state["is_reading"]) == (1, 1, True)


def test_a_source_that_dies_during_a_fetch_fails_it(start: Start) -> None:
    source, reader = start(**STALLED, fault_call=3)
    reader.begin("fetch", source.ask("source"))
    wait_until(lambda: source.ask("state")["is_lending"], "nothing is lent")
    source.kill()
    assert reader.receive() <= 2
    state = reader.ask("state")
    assert (state["failures"], state["lost"], state["is_reading"]) == (1, 0, False)
