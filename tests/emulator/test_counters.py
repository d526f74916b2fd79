"""What the emulated device tells of itself: ids by owner, graphs, waits, updates."""

import time

import pytest
import torch

from dist_aclgraph.device import emulator
from dist_aclgraph.errors import DeviceError

OWNERS = ("streams", "captured", "cascaded", "domains", "graph_domains")


def taken(before):
    """What changed since, without zeros."""
    now = emulator.counters()
    return {key: now[key] - n for key, n in before.items() if now[key] != n}


def capture(body):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        body()
    return graph


@pytest.fixture
def x():
    # The first capture makes streams of torch_npu's own.
    tensor = torch.ones(4, device="npu")
    capture(lambda: tensor + 1).reset()
    torch.npu.synchronize()
    return tensor


def test_ids_are_counted_by_their_owner_and_given_back(x):
    side = torch.npu.Stream()

    def forked():
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x + 1
        torch.npu.current_stream().wait_stream(side)

    def long():
        for _ in range(2100):
            torch.add(x, x, out=x)

    torch.npu.synchronize()
    before = emulator.counters()
    assert sum(before[owner] for owner in OWNERS) + before["available"] == 2048

    graphs = [capture(forked), capture(long)]
    assert taken(before) == {"captured": 3, "cascaded": 1, "available": -4, "graphs": 2}

    for graph in graphs:
        graph.reset()
    assert taken(before) == {}


def test_a_failed_capture_leaves_no_graph(x):
    before = emulator.counters()
    with pytest.raises(RuntimeError):
        capture(lambda: x.cpu())
    assert taken(before) == {}


def test_waits_of_replays_and_updates_are_counted(x):
    y, updates, event = torch.zeros_like(x), torch.npu.Stream(), torch.npu.ExternalEvent()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        torch.add(x, 3.0, out=y)
        group = torch.npu.graph_task_group_end(stream)
    torch.npu.synchronize()
    before = emulator.counters()

    def replay(delay_s):
        graph.replay()
        time.sleep(delay_s)
        with torch.npu.stream(updates):
            torch.npu.graph_task_update_begin(updates, group)
            torch.add(x, 4.0, out=y)
            torch.npu.graph_task_update_end(updates)
            event.record(updates)
        torch.npu.synchronize()
        return taken(before)

    first = replay(0.2)
    assert (first["external_waits"], first["task_updates"]) == (1, 1)
    assert first["external_wait_ns"] > 0.15e9

    second = replay(0.0)
    assert (second["external_waits"], second["task_updates"]) == (2, 2)
    assert second["external_wait_ns"] < 2 * first["external_wait_ns"]


def test_a_wait_outside_a_graph_is_not_counted(x):
    event, other = torch.npu.ExternalEvent(), torch.npu.Stream()
    torch.npu.synchronize()
    before = emulator.counters()
    event.wait(torch.npu.current_stream())
    event.record(other)
    torch.npu.synchronize()
    assert taken(before) == {}


def test_devices_are_counted_apart(x):
    before = emulator.counters(1)
    graph = capture(lambda: x + 1)
    assert emulator.counters(1) == before
    graph.reset()
    with pytest.raises(DeviceError, match="no device 64"):
        emulator.counters(64)
