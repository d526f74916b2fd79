"""Stream ids: counted, limited, taken by captures and given back."""

import textwrap

LIBRARY = """
import ctypes
runtime = ctypes.CDLL("libascendcl.so")
def available():
    count = ctypes.c_uint32()
    assert runtime.aclrtGetStreamAvailableNum(ctypes.byref(count)) == 0
    return count.value
x = torch.ones(4, device="npu")
torch.npu.synchronize()
def capture(body=lambda: x + 1):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        body()
    return graph
capture().reset()
"""


def code(text):
    return LIBRARY + textwrap.dedent(text)


def test_captures_take_ids_until_207008_and_give_them_back(run_script):
    status, output = run_script(
        code("""
        start = available()
        graphs = []
        try:
            while True:
                graphs.append(capture())
        except RuntimeError as e:
            message = str(e)
        print("CAPTURED", len(graphs) == start, available())
        print("MESSAGE", "207008" in message, "stream resources are insufficient" in message)
        for graph in graphs:
            graph.reset()
        print("AFTER", available() == start)
        capture().replay()
        torch.npu.synchronize()
        """),
        streams=60,
    )
    assert status == 0, output
    assert "CAPTURED True 0" in output and "MESSAGE True True" in output and "AFTER True" in output


def test_forks_and_long_captures_take_more(run_script):
    status, output = run_script(
        code("""
        side = torch.npu.Stream()
        def forked():
            main = torch.npu.current_stream()
            side.wait_stream(main)
            with torch.npu.stream(side):
                x + 1
            main.wait_stream(side)
        def long():
            for _ in range(2100):
                torch.add(x, x, out=x)
        start = available()
        a = capture(forked)
        middle = available()
        b = capture(long)
        print("TAKEN", start - middle, middle - available())
        """)
    )
    assert status == 0 and "TAKEN 2 2" in output, output


def test_a_failed_capture_leaks_nothing(run_script):
    status, output = run_script(
        code("""
        start = available()
        for _ in range(30):
            try:
                capture(lambda: x.cpu())
            except RuntimeError:
                pass
        print("LEFT", start - available())
        """),
        streams=60,
    )
    assert status == 0 and "LEFT 0" in output, output


def test_software_queues_are_taken_at_execution_and_recycled(run_script):
    status, output = run_script(
        code("""
        start = available()
        graphs = [capture() for _ in range(1030)]
        print("TAKEN", start - available())
        for graph in graphs:
            graph.replay()
        torch.npu.synchronize()
        print("DONE")
        """),
        accounting="software_sq",
    )
    assert status == 0 and "TAKEN 0" in output and "DONE" in output, output


def test_streams_themselves_are_limited(run_script):
    status, output = run_script(
        """
        import ctypes
        runtime = ctypes.CDLL("libascendcl.so")
        torch.ones(1, device="npu")
        handles = []
        while True:
            handle = ctypes.c_void_p()
            code = runtime.aclrtCreateStream(ctypes.byref(handle))
            if code:
                break
            handles.append(handle)
        print("CODE", code, len(handles) > 10)
        for handle in handles:
            assert runtime.aclrtDestroyStream(handle) == 0
        """,
        streams=100,
    )
    assert status == 0 and "CODE 207005 True" in output, output
