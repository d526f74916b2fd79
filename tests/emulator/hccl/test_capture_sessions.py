"""A collective in a graph belongs to one capture that all ranks made together. All ranks must
replay their graphs of the same capture.
"""

import textwrap

import pytest

PROLOGUE = """
dist.init_process_group("hccl")
n = dist.get_world_size()
torch.npu.synchronize()

def capture(body):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        body()
    return graph

def total(graph):
    x.fill_(rank + 1.0)
    graph.replay()
    torch.npu.synchronize()
    return x[0].item()

def together():
    dist.barrier()
    torch.npu.synchronize()

def reduce():
    dist.all_reduce(x)

x, want = torch.ones(8).npu(), n * (n + 1) / 2
together()
"""
EPILOGUE = """
print("ALL DONE")
os._exit(0)
"""


def program(code: str) -> str:
    return PROLOGUE + textwrap.dedent(code) + EPILOGUE


one_and_two_hosts = pytest.mark.parametrize("hosts", ["a", "ab"])


@one_and_two_hosts
@pytest.mark.parametrize(
    "code,said",
    [
        ("""
         first, second = capture(reduce), capture(reduce)
         total(first), total(second)
         total(first if rank else second)
         """, "replays it from capture 2"),
        ("""
         graph = capture(reduce)
         total(graph)
         if rank == 1:  # as if it had lost its graph, and had captured anew by itself
             graph = capture(reduce)
         total(graph)
         """, "replays it from capture 2"),
        ("""
         graph = capture(reduce)
         total(graph)
         reduce() if rank == 1 else graph.replay()
         torch.npu.synchronize()
         """, "runs it outside a graph"),
    ],
    ids=["order", "captured-alone", "not-in-a-graph"],
)  # fmt: skip
def test_graphs_of_different_captures_do_not_pair(run_ranks, code, said):
    for status, output in run_ranks(program(code), 2):
        assert status != 0
        assert "HCCL mismatch: rank" in output and said in output, output
        assert "all ranks must replay the graph of one capture" in output, output


@one_and_two_hosts
def test_graphs_of_one_capture_pair_in_any_order(run_ranks):
    code = """
    graphs = [capture(reduce) for _ in range(3)]
    for index in (2, 0, 1, 1, 0):
        assert total(graphs[index]) == want
    reduce()
    graphs.pop(1).reset()
    assert total(graphs[1]) == want
    assert total(capture(reduce)) == want
    """
    for status, output in run_ranks(program(code), 3):
        assert status == 0 and "ALL DONE" in output, output


@one_and_two_hosts
def test_a_capture_that_was_undone_because_it_failed_somewhere_does_not_count(run_ranks):
    code = """
    def failing():
        if rank == 1:
            raise KeyError("before its collective")
        reduce()

    for _ in range(2):
        try:
            capture(failing).reset()
        except KeyError:
            pass
        together()
    assert total(capture(reduce)) == want
    """
    for status, output in run_ranks(program(code), 3):
        assert status == 0 and "ALL DONE" in output, output


@one_and_two_hosts
def test_sends_and_receives_are_no_part_of_sessions(run_ranks):
    """Rank 0 captures a send, rank 1 captures a receive and a send in two graphs, and rank 2
    captures a receive.
    """
    code = """
    y, mine = torch.zeros(8).npu(), []
    for a, b, sent in ((0, 1, x), (1, 2, y)):
        if rank == a:
            mine.append(capture(lambda: dist.send(sent, b)))
        elif rank == b:
            mine.append(capture(lambda: dist.recv(y, a)))
    for graph in mine:
        graph.replay()
        torch.npu.synchronize()
    assert y.cpu().tolist() == [float(rank > 0)] * 8
    assert total(capture(reduce)) == want
    """
    for status, output in run_ranks(program(code), 3):
        assert status == 0 and "ALL DONE" in output, output
