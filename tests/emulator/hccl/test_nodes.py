"""HCCL between nodes. Each node has its own network namespace and its own shared memory."""

import re
import time

import pytest

from tools.namespaces import nodes, why_no_nodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_nodes()), reason=why_no_nodes() or ""),
]

CODE = """
dist.init_process_group("hccl")
x = torch.full((20000,), rank + 1.0).npu()
dist.all_reduce(x)
assert x.cpu().unique().tolist() == [10.0]
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    dist.all_reduce(x)
for step in range(3):
    x.fill_(rank + step)
    graph.replay()
    torch.npu.synchronize()
    assert x.cpu().unique().tolist() == [6.0 + 4 * step]
print("SHARED MEMORY", os.listdir("/dev/shm"))
print("SOCKETS", emulator.counters()["socket_bytes"])
print("GOES ON")
try:
    while True:
        graph.replay()
        torch.npu.synchronize()
except RuntimeError as error:
    print(error)
print("ENDED")
time.sleep(8)  # whoever is gone would be why the others stop
os._exit(0)
"""


def test_ranks_of_two_nodes_work_together_until_their_link_is_cut(start_ranks):
    with nodes(2) as pair:
        scripts = start_ranks(CODE, 4, nodes=pair, hccl_s=4)
        deadline = time.monotonic() + 120
        while not all("GOES ON" in s.output() for s in scripts):
            assert time.monotonic() < deadline, [s.output() for s in scripts]
            time.sleep(0.1)
        pair[1].set_link(False)
        results = [script.finish(60) for script in scripts]
    for rank, (status, output) in enumerate(results):
        assert status == 0 and "ENDED" in output, output
        sockets = re.search(r"SOCKETS (\d+)", output)
        assert sockets and int(sockets[1]) > 4 * 20000 * 4 * 2, output
        assert "SHARED MEMORY []" in output, output
        assert f"HCCL timeout after 4 s: rank {rank} of 4 in AllReduce" in output, output
    # On each node, one of the two ranks waits for a rank of the other node. The second rank waits
    # for the first rank.
    said = ["".join(output for _, output in results[first : first + 2]) for first in (0, 2)]
    assert re.search("waits for rank [23]", said[0]) and re.search("waits for rank [01]", said[1])
