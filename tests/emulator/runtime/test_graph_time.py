"""Modelled time of graphs: the nodes and lanes of a replay, and updates of tasks."""

import pytest


def test_replays_take_their_nodes_and_lanes_overlap(told):
    t = told("""
        other = torch.npu.Stream()
        def forked():
            stream = torch.npu.current_stream()
            other.wait_stream(stream)
            with torch.npu.stream(other):
                torch.npu._sleep(20_000_000)
            torch.npu._sleep(30_000_000)
            stream.wait_stream(other)
            torch.npu._sleep(1_000_000)
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            forked()
        first, last = events(2)
        torch.npu.synchronize()
        before = emulator.counters()["modelled_busy_ns"]
        close_gate()
        first.record()
        for _ in range(3):
            graph.replay()
        last.record()
        time.sleep(0.01)  # all launches are done before the gate opens
        open_gate()
        busy = emulator.counters()["modelled_busy_ns"] - before
        print_json(ms=first.elapsed_time(last), busy_ms=busy / 1e6)
    """)
    assert t["ms"] == pytest.approx(93, abs=1e-3)
    assert t["busy_ms"] == pytest.approx(93, abs=1e-3)


LANES = """
    from pathlib import Path
    other = torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        other.wait_stream(stream)
        {captured}
        stream.wait_stream(other)
    graph.replay()
    {opens}
    torch.npu.synchronize()
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    print_json(num_lane_threads=names.count("npu_lane"))
"""


ON_OTHER = "exec('with torch.npu.stream(other): torch.npu._sleep(1000)')"


@pytest.mark.parametrize(
    "captured",
    [
        ON_OTHER,
        f"torch.npu._sleep(1000); other.wait_stream(stream); {ON_OTHER}",
        f"{ON_OTHER}; stream.wait_stream(other); gate.wait(stream); other.wait_stream(stream); "
        + ON_OTHER,
    ],
)
def test_lanes_that_take_turns_need_no_threads(told, captured):
    opens = "gate.record(side)"
    assert told(LANES.format(captured=captured, opens=opens))["num_lane_threads"] == 0


@pytest.mark.parametrize(
    "captured",
    [
        f"torch.npu._sleep(1000); {ON_OTHER}",
        f"{ON_OTHER}; torch.npu._sleep(1000)",
        f"torch.npu._sleep(1000); other.wait_stream(stream); torch.npu._sleep(1000); {ON_OTHER}",
        "gate.wait(stream); gate.reset(stream); gate.record(other)",
    ],
)
def test_lanes_that_run_side_by_side_have_threads(told, captured):
    """Lanes that can run at the same time need threads: while one lane waits for a peer or for the
    host, the other lanes must continue. The first lane needs no additional thread.
    """
    opens = ""
    assert told(LANES.format(captured=captured, opens=opens), wait_s=5)["num_lane_threads"] == 1


def test_a_replay_that_nothing_precedes_begins_after_its_launch(told):
    t = told("""
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            torch.npu._sleep(1_000_000)
        first, last = events(2)
        torch.npu.synchronize()
        first.record()
        graph.replay()
        last.record()
        torch.npu.synchronize()
        print_json(us=first.elapsed_time(last) * 1e3 - 1000, launch_us=rates["graph_launch_us"])
    """)
    assert t["us"] >= t["launch_us"] - 1


UPDATES = """
        x = torch.zeros(4, dtype=torch.bfloat16, device="npu")
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
        def update():
            with torch.npu.stream(updates):
                torch.npu.graph_task_update_begin(updates, group)
                torch.add(x, 4.0, out=y)
                torch.npu.graph_task_update_end(updates)
"""


@pytest.mark.parametrize(
    "learns",
    [
        "event.synchronize()",
        "torch.npu.synchronize()",
        "side.synchronize()",
        "x.cpu()",
        "ask(event)",
        "ask(side)",
    ],
)
def test_the_host_takes_its_time_for_updates_before_it_learns_anything(told, tmp_path, learns):
    """In an update, CANN's host code computes a tiling. On the emulator, the tiling takes modelled
    time.

    The host thread sleeps only once for several updates, for the sum of their times.
    """
    rates = tmp_path / "rates.json"
    rates.write_text('{"update_us": 300}')  # far more than the emulator's own code needs
    t = told(
        UPDATES
        + f"""
        def ask(what):
            while not what.query():
                pass
        update()
        begin, end = events(2)
        torch.npu.synchronize()
        start = time.monotonic()
        begin.record(side)
        for _ in range(3):
            update()
        end.record(side)
        event = end
        {learns}
        print_json(host_us=(time.monotonic() - start) * 1e6,
                   queued_us=begin.elapsed_time(end) * 1e3)
    """,
        rates=str(rates),
    )
    assert t["host_us"] >= 900
    assert t["queued_us"] >= 900  # updates delay the tasks after them


@pytest.mark.parametrize("where", ["update()", "exec(in_a_thread)"])
@pytest.mark.parametrize("task_queue", ["0", "1"])
def test_work_queued_after_updates_runs_after_them_from_any_thread(
    told, tmp_path, monkeypatch, task_queue, where
):
    monkeypatch.setenv("TASK_QUEUE_ENABLE", task_queue)
    rates = tmp_path / "rates.json"
    rates.write_text('{"update_us": 900}')
    t = told(
        UPDATES
        + f"""
        import threading
        in_a_thread = "t = threading.Thread(target=update); t.start(); t.join()"
        begin, end = events(2)
        host_us, queued_us = [], []
        for _ in range(20):
            torch.npu.synchronize()
            start = time.monotonic()
            begin.record(side)
            {where}
            end.record(side)
            torch.npu.synchronize()
            host_us.append((time.monotonic() - start) * 1e6)
            queued_us.append(begin.elapsed_time(end) * 1e3)
        print_json(host_us=min(host_us), queued_us=min(queued_us))
    """,
        rates=str(rates),
    )
    assert t["host_us"] >= 900
    # With a task queue, torch_npu's thread records the first event after the first update. So the
    # measured time does not contain this update.
    assert t["queued_us"] >= 900 - (task_queue == "1") * 300


def test_a_host_that_learns_nothing_runs_ahead_by_a_millisecond_at_most(told):
    t = told(
        UPDATES
        + """
        start = time.monotonic()
        for _ in range(100):
            update()
        print_json(host_us=(time.monotonic() - start) * 1e6, update_us=rates["update_us"])
    """
    )
    assert t["host_us"] >= 100 * t["update_us"] - 1000


def test_external_events_and_updates_move_clocks(told):
    t = told(
        UPDATES
        + """
        before = emulator.counters()
        start = time.monotonic()
        graph.replay()
        with torch.npu.stream(updates):
            torch.npu._sleep(50_000_000)
            update()
            event.record(updates)
        torch.npu.synchronize()
        after = emulator.counters()
        print_json(seconds=time.monotonic() - start,
                   **{name: after[name] - before[name] for name in after})
    """
    )
    assert t["seconds"] >= 0.05
    assert t["external_wait_ns"] >= 40e6 and t["external_waits"] == 1
    assert t["task_updates"] == 1
