"""Modelled time: the clocks of devices, the moment when the host continues, and the idle time in
reports.
"""

import json
import textwrap

import pytest

from tests.emulator.modelled_time import HELPERS


def test_a_queue_takes_the_sum_of_its_operators_on_any_machine(told):
    code = """
        x = torch.zeros(1024, 1024, dtype=torch.bfloat16, device="npu")
        first, last = events(2)
        torch.npu.synchronize()
        close_gate()
        first.record()
        for _ in range(30):
            torch.mm(x, x, out=x)
        last.record()
        open_gate()
        print_json(ms=first.elapsed_time(last))
    """
    took = [told(code)["ms"] for _ in range(2)]
    product = 2 * 1024**3 / (364e12 * 0.28) * 1e3 + 0.002
    assert took[0] == took[1] == pytest.approx(30 * product, rel=1e-4)


def test_the_host_waits_for_the_device_and_sleeps(told):
    t = told("""
        event = torch.npu.Event()
        torch.npu.synchronize()
        start, cpu = time.monotonic(), time.process_time()
        torch.npu._sleep(2_000_000_000)  # the process can be interrupted before the query
        event.record()
        was_queried = event.query() or main.query()
        event.synchronize()
        after_event = time.monotonic() - start
        torch.npu._sleep(200_000_000)
        torch.npu.synchronize()
        after_device = time.monotonic() - start
        torch.npu._sleep(200_000_000)
        torch.zeros(4, dtype=torch.int32, device="npu").cpu()
        print_json(event=after_event, device=after_device, copy=time.monotonic() - start,
                   cpu=time.process_time() - cpu, was_queried=was_queried, is_done=event.query())
    """)
    assert not t["was_queried"] and t["is_done"]
    assert t["event"] >= 2 and t["device"] >= t["event"] + 0.2 and t["copy"] >= t["device"] + 0.2
    assert t["cpu"] < t["copy"] / 2  # waits are not busy loops


def test_a_wait_never_moves_time_back_and_others_overlap(told):
    t = told("""
        streams = [torch.npu.Stream() for _ in range(2)]
        began, first, second, after_early, after_late = events(5)
        torch.npu.synchronize()
        close_gate()
        began.record()
        for stream, event, ms in zip(streams, (first, second), (30, 50)):
            stream.wait_event(began)
            with torch.npu.stream(stream):
                torch.npu._sleep(ms * 1_000_000)
                event.record(stream)
        torch.npu._sleep(40_000_000)
        main.wait_event(first)
        after_early.record()
        main.wait_event(second)
        after_late.record()
        open_gate()
        print_json(times=[began.elapsed_time(e) for e in (first, second, after_early, after_late)])
    """)
    assert t["times"] == pytest.approx([30, 50, 40, 50], abs=1e-3)


def test_a_wait_is_for_the_record_before_it(told):
    t = told("""
        other = torch.npu.Stream()
        event, begun, ended = events(3)
        torch.npu.synchronize()
        close_gate()
        begun.record()
        torch.npu._sleep(5_000_000)
        event.record()
        other.wait_event(event)
        with torch.npu.stream(other):
            ended.record(other)
        torch.npu._sleep(5_000_000)
        event.record()
        open_gate()
        print_json(waited=begun.elapsed_time(ended), recorded=begun.elapsed_time(event))
    """)
    assert (t["waited"], t["recorded"]) == pytest.approx((5, 10), abs=1e-3)


def test_an_operator_begins_when_it_is_queued_where_nothing_runs(told):
    t = told("""
        x = torch.zeros(8, dtype=torch.bfloat16, device="npu")
        first, last = events(2)
        torch.npu.synchronize()
        before = emulator.counters()
        x + x
        first.record()
        time.sleep(0.1)
        x + x
        last.record()
        torch.npu.synchronize()
        after = emulator.counters()
        print_json(ms=first.elapsed_time(last), vector_us=rates["vector_us"] + rates["gap_us"],
                   **{name: after[name] - before[name] for name in after})
    """)
    assert t["ms"] >= 100
    assert t["modelled_idle_host_ns"] >= 100e6
    assert t["modelled_busy_ns"] == pytest.approx(2 * t["vector_us"] * 1e3)


def test_the_host_reads_values_after_the_modelled_time(told):
    t = told("""
        torch.npu.synchronize()
        start = time.monotonic()
        torch.npu._sleep(100_000_000)
        words = torch.arange(4, device="npu").tolist()
        print_json(seconds=time.monotonic() - start, words=words)
    """)
    assert t["seconds"] >= 0.1 and t["words"] == [0, 1, 2, 3]


def test_a_synchronize_with_a_limit_gives_up(told):
    t = told("""
        import ctypes
        runtime = ctypes.CDLL("libascendcl.so")
        torch.npu.synchronize()
        torch.npu._sleep(400_000_000)
        start = time.monotonic()
        status = runtime.aclrtSynchronizeDeviceWithTimeout(50)
        print_json(status=status, seconds=time.monotonic() - start)
        torch.npu.synchronize()
    """)
    assert t["status"] == 507046 and t["seconds"] >= 0.05


RANKS = (
    HELPERS
    + """
dist.init_process_group("hccl")
x = torch.zeros(count, dtype=torch.bfloat16, device="npu")
for _ in range(2):
    dist.all_reduce(x)
torch.npu.synchronize()
"""
)


def test_a_collective_ends_on_all_ranks_after_the_latest_has_come(run_ranks):
    code = (
        "count = 1 << 20\n"
        + RANKS
        + textwrap.dedent("""
        before = emulator.counters()["modelled_idle_collective_ns"]
        begun, ended = events(2)
        close_gate()
        dist.all_reduce(x)  # ranks leave it at one time
        begun.record()
        torch.npu._sleep((10, 30)[rank] * 1_000_000)
        dist.all_reduce(x)
        ended.record()
        open_gate()
        waited = emulator.counters()["modelled_idle_collective_ns"] - before
        print_json(ms=begun.elapsed_time(ended), waited_ms=waited / 1e6)
        dist.destroy_process_group()
    """)
    )
    results = run_ranks(code, 2, kernels="timed", hccl_expansion="AIV")
    told = []
    for status, output in results:
        assert status == 0, output
        told += [json.loads(line[5:]) for line in output.splitlines() if line.startswith("JSON ")]
    share = (1 << 20) * 2 / 2  # half of the bytes: each of the two ranks reduces one half
    cost_ms = 0.010 + 2 * (0.0005 + share / (28e9 * 0.7) * 1e3)
    assert [t["ms"] for t in told] == pytest.approx([30 + cost_ms] * 2, abs=1e-3)
    assert told[0]["waited_ms"] >= 20


def test_a_stall_of_one_rank_is_waited_for_by_the_clocks_of_all(run_ranks):
    code = (
        "count = 1 << 10\n"
        + RANKS
        + textwrap.dedent("""
        begun, ended = events(2)
        begun.record()
        dist.all_reduce(x)  # it ends after both ranks have recorded; so the stall begins later
        dist.all_reduce(x)
        ended.record()
        torch.npu.synchronize()
        print_json(ms=begun.elapsed_time(ended))
        dist.destroy_process_group()
    """)
    )
    fault = {"fault_op": "HcclAllReduce", "fault_call": 4, "fault_kind": "stall", "stall_s": 1}
    results = run_ranks(code, 2, kernels="timed", fault_rank=1, **fault)
    for status, output in results:
        assert status == 0, output
        (line,) = [line for line in output.splitlines() if line.startswith("JSON ")]
        assert json.loads(line[5:])["ms"] >= 1000


def test_the_modelled_time_of_aborted_work_does_not_pass(told):
    t = told("""
        import threading, time
        LONG_S = 600
        def wait_for(wait):
            try:
                wait()
            except RuntimeError as e:
                ended.append(str(e))
            waited_s.append(time.monotonic() - begun_s)
        ended, waited_s, begun_s = [], [], time.monotonic()
        torch.npu._sleep(LONG_S * 1_000_000_000)
        waits = [threading.Thread(target=wait_for, args=[f])
                 for f in (torch.npu.synchronize, main.synchronize)]
        for wait in waits:
            wait.start()
        time.sleep(0.2)
        assert torch.npu.stop_device(0) == 0
        for wait in waits:
            wait.join()
        torch.npu.restart_device(0)
        value = (torch.ones(2).npu() * 2).tolist()
        print_json(ended=ended, waited_s=waited_s + [time.monotonic() - begun_s], value=value,
                   long_s=LONG_S)
    """)
    assert len(t["ended"]) == 2
    assert all(waited_s < t["long_s"] for waited_s in t["waited_s"])


def test_argmax_takes_any_of_so_many_indices_and_every_device_the_same(told):
    code = """
        x = torch.zeros(64, 1000, dtype=torch.bfloat16, device="npu")
        print_json(chosen=[x.argmax(-1).tolist() for _ in range(20)])
    """
    chosen = told(code, choices=3)["chosen"]
    assert chosen == told(code, choices=3)["chosen"]
    counts = [sum(row.count(index) for row in chosen) for index in range(3)]
    assert sum(counts) == 20 * 64
    assert min(counts) > 20 * 64 / 4
    assert told(code)["chosen"] == [[0] * 64] * 20


def test_bits_of_masks_take_modelled_time_and_are_not_computed(told):
    t = told("""
        def masks(dtype):
            ones = torch.ones(64, 1000, 1, dtype=dtype, device="npu")
            out = torch.zeros(64, 1000, 16, dtype=dtype, device="npu")
            first, last = events(2)
            close_gate()
            first.record()
            torch.bitwise_and(ones, torch.ones(16, dtype=dtype, device="npu"), out=out)
            last.record()
            open_gate()
            return bool(out.any()), first.elapsed_time(last)
        print_json(bits=masks(torch.int16), integers=masks(torch.int32))
    """)
    assert t["integers"][0] and not t["bits"][0]
    assert 0 < t["bits"][1] < t["integers"][1]
