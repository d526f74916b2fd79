"""The emulated device counts graphs, waits of the host, updates, and the stream ids of each
owner.
"""

import time

import pytest
import torch

from dist_aclgraph.device import emulator
from dist_aclgraph.errors import DeviceError

OWNERS = ("streams", "captured", "cascaded", "domains", "graph_domains")


def taken(before):
    """Return the changes of the counters since ``before``, except the count of the host's waits."""
    now = emulator.counters()
    changed = {key: now[key] - n for key, n in before.items() if now[key] != n}
    changed.pop("host_syncs", None)
    return changed


def waits(before):
    """Return how often the host has waited since ``before``."""
    return emulator.counters()["host_syncs"] - before["host_syncs"]


def capture(body):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        body()
    return graph


@pytest.fixture
def x():
    # The first capture creates streams that torch_npu uses itself.
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
    before, graph = emulator.counters(), torch.npu.NPUGraph()
    with pytest.raises(RuntimeError), torch.npu.graph(graph):
        x.cpu()
    graph.reset()  # before the reset, the graph contains the calls that preceded the refused call
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


def test_each_call_in_which_the_host_waits_is_counted(x):
    stream, event = torch.npu.current_stream(), torch.npu.Event()
    event.record()
    for wait in (torch.npu.synchronize, stream.synchronize, event.synchronize, x.cpu):
        torch.npu.synchronize()
        before = emulator.counters()
        wait()
        assert waits(before) >= 1

    torch.npu.synchronize()
    before, on_host = emulator.counters(), torch.ones(4).pin_memory()
    for _ in range(3):
        x.copy_(on_host, non_blocking=True)
        event.record()
        event.query()
    assert waits(before) == 0
    torch.npu.synchronize()


def test_devices_are_counted_apart(x):
    before = emulator.counters(1)
    graph = capture(lambda: x + 1)
    assert emulator.counters(1) == before
    graph.reset()
    with pytest.raises(DeviceError, match="no device 64"):
        emulator.counters(64)


def ran_on_the_ai_cpu(call):
    torch.npu.synchronize()
    before = emulator.ai_cpu_operators()
    call()
    torch.npu.synchronize()
    now = emulator.ai_cpu_operators()
    return {name: n - before.get(name, 0) for name, n in now.items() if n != before.get(name, 0)}


LONGS = torch.arange(6).view(2, 3)


@pytest.mark.parametrize(
    "operator,call",
    [
        ("aclnnCumsum", lambda a: a.cumsum(0)),
        ("aclnnScatter", lambda a: a.scatter(0, a.clamp(max=1), a)),
        ("aclnnFloorDivides", lambda a: a // 2),
        ("aclnnSort", lambda a: a.sort()),
        ("aclnnNonzero", lambda a: a.nonzero()),
    ],
)
def test_long_integers_that_have_no_kernel_run_on_the_ai_cpu(operator, call):
    names = ran_on_the_ai_cpu(lambda: call(LONGS.npu()))
    assert len(names) == 1 and next(iter(names)).startswith(operator.removesuffix("s"))


@pytest.mark.parametrize(
    "call",
    [
        lambda a: a.bool().cumsum(0, dtype=torch.int32),
        lambda a: a.float().scatter(0, a.clamp(max=1), a.float()),
        lambda a: a.int() // 2,
        lambda a: a.sum(),  # since November 2025, this operator has a kernel for int64, too
        lambda a: a.float().sort(),
        lambda a: torch.where(a < 2, a, a + 1),
    ],
)
def test_operators_with_a_kernel_do_not_run_on_the_ai_cpu(call):
    assert ran_on_the_ai_cpu(lambda: call(LONGS.npu())) == {}


def test_long_rows_are_scattered_by_the_ai_cpu_of_8_5_alone(run_script):
    code = """
    rows, ids = torch.zeros(50 * 24576 + 1).npu(), torch.zeros(1, dtype=torch.int64).npu()
    rows.scatter(0, ids, 1.0)
    torch.npu.synchronize()
    print("AI CPU", list(emulator.ai_cpu_operators()))
    """
    for cann, names in (("8.5.0", "['aclnnScatterValue']"), ("9.0.0", "[]")):
        status, output = run_script(code, cann=cann)
        assert status == 0 and f"AI CPU {names}" in output, output


def test_a_graph_tells_how_many_tasks_the_ai_cpu_runs(x):
    longs = LONGS.npu()
    torch.npu.synchronize()
    before = emulator.counters()

    graph = capture(lambda: (longs.cumsum(0), x + 1, longs // 2))
    assert emulator.counters()["ai_cpu_captured"] - before["ai_cpu_captured"] == 2
    for _ in range(3):
        graph.replay()
    torch.npu.synchronize()
    assert emulator.counters()["ai_cpu"] - before["ai_cpu"] == 6

    graph.reset()
    assert emulator.counters()["ai_cpu_captured"] == before["ai_cpu_captured"]


def test_launches_with_unaligned_views_are_counted(x):
    many = torch.zeros(64, device="npu")
    torch.npu.synchronize()
    before = emulator.counters()
    many[8:16] + many[16:24]
    torch.npu.synchronize()
    assert taken(before) == {}
    many[1:9] + many[16:24]
    torch.npu.synchronize()
    assert taken(before) == {"unaligned_views": 1}


def test_operators_with_unaligned_views_are_told_by_name(x):
    torch.npu.synchronize()
    before = emulator.unaligned_operators()
    torch.ones(16, device="npu")[1:] + 1
    torch.npu.synchronize()
    now = emulator.unaligned_operators()
    assert {
        name: now[name] - before.get(name, 0) for name in now if now[name] != before.get(name)
    } == {"aclnnAdds": 1}
