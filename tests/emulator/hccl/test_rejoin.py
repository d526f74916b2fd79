"""The process of a rank dies. A new process replaces it, and all ranks continue with new
communicators and new graphs.
"""

import re

# Ranks 0 and 1 outlive the first process of rank 2. They meet the second process of rank 2 over a
# new store.
RANKS = """
import datetime
FOLDER = os.environ["FOLDER"]

def join(name, size=3):
    store = dist.FileStore(f"{FOLDER}/{name}", size)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("hccl", store=store, rank=rank, world_size=size, timeout=limit)
    return [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([1, 2])]

x, out = torch.ones(64, device="npu"), torch.zeros(64, device="npu")
def step(groups):
    y = x * 2
    for group in groups:
        if rank in dist.get_process_group_ranks(group):
            dist.all_reduce(y, group=group)
    out.copy_(y)

def capture(groups):
    step(groups)
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        step(groups)
    return graph

def run(graph, value):
    x.fill_(value)
    graph.replay()
    torch.npu.synchronize()
    print("SUM", out.cpu().unique().tolist(), flush=True)
"""
FIRST = (
    RANKS
    + """
kept = torch.arange(8.0).npu()
groups = join("first")
graph = capture(groups)
import ctypes
def count_streams():
    count = ctypes.c_uint32()
    assert ctypes.CDLL("libascendcl.so").aclrtGetStreamAvailableNum(ctypes.byref(count)) == 0
    return count.value
streams = count_streams()
run(graph, 1.0)
if rank == 2:
    os.kill(os.getpid(), 9)
import threading
def wait_for_ever():
    try:
        run(graph, 2.0)
    except RuntimeError as e:
        print("FAILED", str(e).replace(chr(10), " "), flush=True)
waits = threading.Thread(target=wait_for_ever)
waits.start()
time.sleep(1)
assert torch.npu.stop_device(rank) == 0
waits.join(180)
assert not waits.is_alive()
torch.npu.restart_device(rank)
del graph
import gc; gc.collect()
dist.destroy_process_group()
print("LEFT", flush=True)
groups = join("second")
graph = capture(groups)
run(graph, 3.0)
print("KEPT", kept.tolist() == list(range(8)), "STREAMS", streams - count_streams(), flush=True)
dist.barrier(group=groups[0])
os._exit(0)
"""
)
SECOND = (
    RANKS
    + """
if rank != 2:
    os._exit(0)
groups = join("second")
run(capture(groups), 3.0)
dist.barrier(group=groups[0])
os._exit(0)
"""
)


def test_two_of_three_go_on_with_another_third(start_ranks, tmp_path):
    environment = {"FOLDER": str(tmp_path)}
    first = start_ranks(FIRST, 3, environment=environment)
    assert first[2].finish(60)[0] == -9
    second = start_ranks(SECOND, 3, environment=environment)[2]

    for rank, script in enumerate([*first[:2], second]):
        status, output = script.finish(90)
        assert status == 0, output
        # Each rank starts with the value 2 * 3 = 6. First, all three ranks sum their values; then
        # ranks 0 and 1 sum their values; then ranks 1 and 2 sum their values.
        assert f"SUM [{[36.0, 54.0, 54.0][rank]}]" in output, output
        if rank < 2:
            assert re.search("FAILED .*(rank 2 of 3 is dead|FORCE STOP)", output), output
            assert "KEPT True STREAMS 0" in output, output
