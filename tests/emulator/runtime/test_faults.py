"""Injected faults: the n-th call of an operator fails or stalls, on one rank or on all ranks."""

import re


def seconds_of(what: str, output: str) -> list[float]:
    return [float(text) for text in re.findall(rf"{what} ([\d.e-]+)", output)]


def test_the_third_call_fails_with_its_name(run_script):
    _status, output = run_script(
        """
        x = torch.ones(4).npu()
        for i in range(5):
            x.cumsum(0)
            try:
                torch.npu.synchronize()
            except RuntimeError as e:
                print("FAILED AT", i + 1, str(e).replace(chr(10), " "))
                break
        """,
        fault_op="aclnnCumsum",
        fault_call=3,
    )
    assert "FAILED AT 3" in output and "injected fault in call 3 of aclnnCumsum" in output, output


def test_replays_count_and_a_stall_only_delays(run_script):
    status, output = run_script(
        """
        x, y = torch.ones(4).npu(), torch.zeros(4).npu()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            torch.add(x, x, out=y)
        for i in range(3):
            begin = time.monotonic()
            graph.replay()
            torch.npu.synchronize()
            print("STEP", time.monotonic() - begin)
        print(y.tolist())
        """,
        fault_op="aclnnAdd",
        fault_call=2,
        fault_kind="stall",
        stall_s=1,
    )
    assert status == 0, output
    steps_s = seconds_of("STEP", output)
    assert len(steps_s) == 3 and max(steps_s) == steps_s[1] >= 1
    assert "[2.0, 2.0, 2.0, 2.0]" in output


def test_a_fault_of_one_rank_leaves_the_others_alone(run_ranks):
    results = run_ranks(
        """
        dist.init_process_group("hccl")
        dist.all_reduce(torch.ones(4).npu())
        torch.npu.synchronize()
        torch.ones(4).npu().cumsum(0)
        try:
            torch.npu.synchronize()
            print("FINE")
        except RuntimeError as e:
            print("FAULT", e)
        os._exit(0)
        """,
        2,
        fault_op="aclnnCumsum",
        fault_rank=1,
    )
    assert "FINE" in results[0][1]
    assert "FAULT" in results[1][1] and "injected fault" in results[1][1]


CAPTURES = """
x = torch.ones(4, device="npu")
def capture(body, pool=None):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, pool=pool):
        body()
    return graph
def attempt(what, body, pool=None):
    begin = time.monotonic()
    try:
        capture(body, pool).replay()
        torch.npu.synchronize()
        print(what, "FINE", time.monotonic() - begin)
    except RuntimeError as e:
        print(what, "FAILED", str(e).replace(chr(10), " "))
"""


def test_the_second_recording_fails_and_the_next_capture_does_not(run_script):
    status, output = run_script(
        CAPTURES
        + """
from dist_aclgraph.device.npu import release_failed_capture
x.cumsum(0)
before = emulator.counters()
attempt("FIRST", lambda: x.cumsum(0))
def careless():
    try:
        x.cumsum(0)
    except RuntimeError as e:
        print("SWALLOWED", str(e).replace(chr(10), " "))
pool = torch.npu.graph_pool_handle()
attempt("SECOND", careless, pool)
release_failed_capture(pool)
attempt("THIRD", lambda: x.cumsum(0))
after = emulator.counters()
print("LEFT", {k: after[k] - before[k] for k in ("captured", "graphs")})
""",
        fault_op="aclnnCumsum",
        fault_when="capture",
        fault_call=2,
    )
    assert status == 0, output
    assert "FIRST FINE" in output and "THIRD FINE" in output
    assert "injected fault in recording 2 of aclnnCumsum" in output
    assert "SECOND FAILED" in output and "507903" in output
    assert "LEFT {'captured': 0, 'graphs': 0}" in output


def test_a_stalled_recording_holds_the_launching_thread(run_script):
    status, output = run_script(
        CAPTURES
        + """
attempt("WARM", lambda: x + 1)
attempt("FIRST", lambda: x.cumsum(0))
attempt("SECOND", lambda: x.cumsum(0))
""",
        fault_op="aclnnCumsum",
        fault_when="capture",
        fault_kind="stall",
        stall_s="3",
    )
    assert status == 0, output
    [first_s], [second_s] = seconds_of("FIRST FINE", output), seconds_of("SECOND FINE", output)
    assert second_s < first_s >= 3


def test_a_death_leaves_no_word(run_script):
    code = CAPTURES + 'graph = capture(lambda: x.cumsum(0))\nprint("CAPTURED")\n'
    code += 'graph.replay()\ntorch.npu.synchronize()\nprint("REPLAYED")\n'
    fault = {"fault_op": "aclnnCumsum", "fault_kind": "die"}

    status, output = run_script(code, fault_when="capture", **fault)
    assert status == 137 and "CAPTURED" not in output, output

    status, output = run_script(code, fault_when="execute", **fault)
    assert status == 137 and "CAPTURED" in output and "REPLAYED" not in output, output


def test_memory_runs_out_in_the_middle_of_a_capture(run_script):
    status, output = run_script(
        CAPTURES
        + """
def hoard():
    return [torch.empty(64 << 20, dtype=torch.uint8, device="npu") for _ in range(3)]
attempt("WARM", lambda: x + 1)
torch.npu.empty_cache()
attempt("FIRST", hoard)
attempt("SECOND", hoard)
""",
        fault_op="alloc",
        fault_call=3,
    )
    assert status == 0, output
    assert "WARM FINE" in output and "SECOND FINE" in output
    assert "FIRST FAILED" in output and "out of memory" in output


def test_a_file_arms_a_fault_for_one_call(run_script, tmp_path):
    armed = tmp_path / "armed"
    status, output = run_script(
        f"""
        from pathlib import Path
        armed = Path({str(armed)!r})
        x, y = torch.ones(4).npu(), torch.zeros(4).npu()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            torch.add(x, x, out=y)
        def arm(words):
            new = armed.with_suffix(".new")
            new.write_text(words)
            new.rename(armed)
        def step():
            begin = time.monotonic()
            graph.replay()
            torch.npu.synchronize()
            print("STEP", time.monotonic() - begin, armed.exists())
        arm("fault_op=aclnnMul fault_kind=die")
        step()
        arm("fault_op=aclnnAdd fault_rank=3 fault_kind=die")
        step()
        arm("fault_op=aclnnAdd fault_kind=stall stall_s=1")
        step()
        step()
        arm("fault_op=aclnnAdd fault_when=capture")
        step()
        other = torch.npu.NPUGraph()
        try:
            with torch.npu.graph(other):
                torch.add(x, x, out=y)
        except RuntimeError as e:
            print("CAPTURE", str(e).replace(chr(10), " "))
        arm("fault_op=aclnnAdd")
        try:
            step()
        except RuntimeError as e:
            print("REPLAY", armed.exists(), str(e).replace(chr(10), " "))
        """,
        fault_file=str(armed),
    )
    assert status == 0, output
    left = re.findall(r"STEP [\d.e-]+ (True|False)", output)
    assert left == ["True", "True", "False", "False", "True"], output
    steps_s = seconds_of("STEP", output)
    assert max(steps_s) == steps_s[2] >= 1
    assert "CAPTURE" in output, output
    assert "REPLAY False" in output
    assert "injected fault in call that a file has armed of aclnnAdd" in output
