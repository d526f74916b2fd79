"""Stream ids are limited, and used ids are counted. Captures take ids, and give them back."""

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
        from dist_aclgraph.device.versions import installed_line
        if installed_line().forgets_failed_captures:
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


SOFTWARE = """
start, ids = available(), emulator.counters()["available"]
def state():
    now = emulator.counters()
    keys = ("queue_pool", "queues", "queue_bindings")
    return [ids - now["available"], start - available(), *(now[key] for key in keys)]
def replay(*graphs):
    for graph in graphs:
        graph.replay()
    torch.npu.synchronize()
"""


def software(text):
    return LIBRARY.replace("capture().reset()", "") + SOFTWARE + textwrap.dedent(text)


def test_software_queues_are_pooled_by_capture_and_bound_by_execution(run_script):
    status, output = run_script(
        software("""
        capture().reset()  # streams of torch_npu's own, and one queue
        start, ids, known = available(), emulator.counters()["available"], state()
        print("ONE", known[2:])
        graphs = [capture() for _ in range(3)]
        print("CAPTURED", state())
        replay(*graphs)
        replay(*graphs)
        print("REPLAYED", state())
        for graph in graphs:
            graph.reset()
        print("FREED", state())
        """),
        accounting="software_sq",
    )
    assert status == 0, output
    assert "ONE [1, 0, 0]" in output
    # The five numbers are: the used stream ids, the decrease of aclrtGetStreamAvailableNum, the
    # queues in the pool, the queues that are bound now, and the bindings since the start.
    assert "CAPTURED [3, 3, 4, 0, 0]" in output
    assert "REPLAYED [3, 3, 4, 3, 3]" in output
    assert "FREED [0, 3, 4, 0, 3]" in output


def test_more_graphs_than_queues_replay_and_the_oldest_idle_ones_are_rebound(run_script):
    status, output = run_script(
        software("""
        y = torch.zeros(1, device="npu")
        graphs = [capture(lambda: y.add_(1)) for _ in range(1030)]
        print("CAPTURED", state()[2:])
        replay(*graphs)
        print("REPLAYED", state()[2:])
        replay(graphs[6], graphs[1029])
        print("WARM", state()[4])
        replay(graphs[0])
        print("COLD", state()[4])
        replay(graphs[6])
        print("LOST", state()[4])
        replay(graphs[0])
        print("NOT LRU", state()[4])
        print("SUM", y.item())
        """),
        accounting="software_sq",
    )
    assert status == 0, output
    assert "CAPTURED [1024, 0, 0]" in output and "REPLAYED [1024, 1024, 1030]" in output
    # Graphs lose their queues in the order in which the graphs were created, no matter when they
    # last ran. At first, graphs[0] to graphs[5] have lost their queues. When graphs[0] runs again,
    # graphs[6] loses its queues. When graphs[6] then runs again, graphs[0] loses its queues,
    # although it ran last.
    assert "WARM 1030" in output and "COLD 1031" in output and "LOST 1032" in output
    assert "NOT LRU 1033" in output and "SUM 1035.0" in output


def test_a_graph_of_more_than_1024_queues_is_captured_and_cannot_run(run_script):
    status, output = run_script(
        software("""
        def made(create, *options):
            handle = ctypes.c_void_p()
            assert create(ctypes.byref(handle), *options) == 0
            return handle
        lanes = [made(runtime.aclrtCreateStream) for _ in range(1024)]
        fork = made(runtime.aclrtCreateEvent)
        joins = [made(runtime.aclrtCreateEvent) for _ in lanes]
        def wide():
            x + 1
            main = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
            assert runtime.aclrtRecordEvent(fork, main) == 0
            for lane, join in zip(lanes, joins):
                assert runtime.aclrtStreamWaitEvent(lane, fork) == 0
                assert runtime.aclrtRecordEvent(join, lane) == 0
                assert runtime.aclrtStreamWaitEvent(main, join) == 0
        graph = capture(wide)
        print("CAPTURED", emulator.counters()["captured"])
        try:
            replay(graph)
        except RuntimeError as e:
            print("MESSAGE", str(e).replace(chr(10), " "))
        print("BOUND", emulator.counters()["queues"])
        """),
        accounting="software_sq",
        streams=4096,
    )
    assert status == 0, output
    assert "CAPTURED 1025" in output and "BOUND 0" in output and "207005" in output
    assert "EE1023: too many streams captured: the graph needs 1025 queues, at most 1024" in output


def test_ids_limit_captures_with_software_queues_too(run_script):
    status, output = run_script(
        software("""
        graphs = []
        try:
            while True:
                graphs.append(capture())
        except RuntimeError as e:
            print("MESSAGE", "207008" in str(e), emulator.counters()["available"])
        before = emulator.counters()
        for graph in graphs:
            graph.reset()
        after = emulator.counters()
        print("POOL", after["queue_pool"] == before["queue_pool"] == len(graphs), available())
        handle = ctypes.c_void_p()
        print("CREATED", runtime.aclrtCreateStream(ctypes.byref(handle)))
        print("SHRUNK", after["queue_pool"] - emulator.counters()["queue_pool"])
        """),
        accounting="software_sq",
        streams=60,
    )
    assert status == 0, output
    assert "MESSAGE True 0" in output
    # The queues of a freed graph stay in the pool. If the device has no free queue, a new stream
    # takes a queue from the pool.
    assert "POOL True 0" in output and "CREATED 0" in output and "SHRUNK 1" in output


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
