"""A communicator cannot be destroyed while a call uses it. If a communicator is destroyed while
tasks of ranks wait in it, the waits end. Counters show whether graphs or tasks used a communicator
when it was destroyed.
"""

import re

PROGRAM = """
import ctypes, threading
dist.init_process_group("hccl")
hccl = ctypes.CDLL("libhccl.so")
backend = dist.group.WORLD._get_backend(torch.device("npu"))
x = torch.ones(64, device="npu")
def destroy():
    return hccl.HcclCommDestroy(ctypes.c_void_p(handle))
def attempt(what, body):
    begin = time.monotonic()
    try:
        body()
        print(what, "FINE", flush=True)
    except RuntimeError as e:
        text = str(e).replace(chr(10), " ")
        print(what, "FAILED", time.monotonic() - begin < 60, text, flush=True)
def capture():
    with torch.npu.graph(graph):
        dist.all_reduce(x)
"""


def test_a_communicator_is_not_destroyed_during_a_call(run_ranks):
    [(status, output)] = run_ranks(
        PROGRAM
        + """
dist.all_reduce(x)
torch.npu.synchronize()
handle, graph = backend.get_hccl_comm(rank), torch.npu.NPUGraph()
captures = threading.Thread(target=capture)
captures.start()
time.sleep(1)
print("AGAIN", destroy(), emulator.counters()["domains"] > 0)
captures.join()
counters = destroy(), emulator.counters()
print("HELD", counters[0], *map(counters[1].get, ("domains", "careless_destroys")), flush=True)
attempt("REPLAY", lambda: (graph.replay(), torch.npu.synchronize()))
os._exit(0)
""",
        1,
        fault_op="HcclAllReduce",
        fault_when="capture",
        fault_kind="stall",
        stall_s=3,
    )
    assert status == 0, output
    assert "AGAIN 20 True" in output and "is in use, try again" in output, output
    assert "HELD 0 0 1" in output and "graphs hold 1 tasks" in output, output
    assert re.search("REPLAY FAILED True .*was destroyed", output), output


def test_destroying_a_communicator_ends_a_wait_for_a_missing_peer(run_ranks):
    results = run_ranks(
        PROGRAM
        + """
if rank == 0:
    backend.get_hccl_comm(rank)
    dist.all_reduce(x)  # its first; the other rank makes the communicator, and no more
    handle = backend.get_hccl_comm(rank)
    threading.Timer(2, lambda: print("FREES", destroy(), flush=True)).start()
    attempt("WAIT", torch.npu.synchronize)
else:
    handle = backend.get_hccl_comm(rank)
    time.sleep(6)
os._exit(0)
""",
        2,
    )
    output = results[0][1]
    assert results[0][0] == 0, output
    assert "FREES 0" in output and "abort or synchronize first" in output, output
    assert re.search("WAIT FAILED True .*destroyed while rank 0 was in", output), output


def test_nothing_is_said_where_graphs_went_first_and_tasks_were_aborted(run_ranks):
    results = run_ranks(
        PROGRAM
        + """
dist.all_reduce(x)
torch.npu.synchronize()
graph = torch.npu.NPUGraph()
capture()
if rank == 0:
    for _ in range(5):
        graph.replay()  # the other rank does not
    assert torch.npu.stop_device(rank) == 0
    torch.npu.restart_device(rank)
del graph
import gc; gc.collect()
dist.destroy_process_group()
print("LEFT", *map(emulator.counters().get, ("domains", "careless_destroys")), flush=True)
os._exit(0)
""",
        2,
    )
    for status, output in results:
        assert status == 0 and "LEFT 0 0" in output, output
        assert "HcclCommDestroy" not in output, output
