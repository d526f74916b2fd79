"""HCCL between processes: results, captures, calls that do not match, and ranks that are absent or
dead.
"""

import re
import time
from pathlib import Path

import pytest

from tests.slow import slow

ALL = """
dist.init_process_group("hccl")
n = dist.get_world_size()

def same(what, tensor, want):
    got = tensor.cpu().tolist()
    assert got == want, (what, got, want)

total = n * (n + 1) / 2
for count in (1, 5, 3000, 300000):
    x = torch.full((count,), rank + 1.0, device="npu")
    dist.all_reduce(x)
    assert x.cpu().unique().tolist() == [total], ("all_reduce", count)
    out = torch.empty(n * count, device="npu")
    dist.all_gather_into_tensor(out, torch.full((count,), float(rank), device="npu"))
    assert torch.equal(out.cpu(), torch.arange(n).float().repeat_interleave(count)), "all_gather"
    part = torch.empty(count, device="npu")
    dist.reduce_scatter_tensor(part, torch.arange(n * count).float().npu() % 97)
    want = (torch.arange(n * count).float() % 97)[rank * count:(rank + 1) * count] * n
    assert torch.equal(part.cpu(), want), "reduce_scatter"
    y = torch.full((count,), float(rank), device="npu")
    dist.broadcast(y, 1)
    assert y.cpu().unique().tolist() == [1.0], "broadcast"
    z = torch.empty(n * count, device="npu")
    dist.all_to_all_single(z, torch.arange(n).float().repeat_interleave(count).npu() + 100 * rank)
    assert torch.equal(z.cpu(), (torch.arange(n) * 100.0 + rank).repeat_interleave(count))

for dtype in (torch.bfloat16, torch.float16, torch.int32, torch.int64):
    x = torch.full((7,), rank + 1, dtype=dtype, device="npu")
    dist.all_reduce(x)
    same("sum", x, [total] * 7)
x = torch.tensor([float(rank)]).npu()
dist.all_reduce(x, op=dist.ReduceOp.MAX)
same("maximum", x, [n - 1.0])

sizes = [[(a + b) % 3 for b in range(n)] for a in range(n)]
receive = [sizes[r][rank] for r in range(n)]
out = torch.zeros(sum(receive), device="npu")
mine = torch.full((sum(sizes[rank]),), float(rank)).npu()
dist.all_to_all_single(out, mine, receive, sizes[rank])
same("all_to_all with sizes", out, sum(([float(r)] * receive[r] for r in range(n)), []))

pairs = [dist.new_group([a, a + 1]) for a in range(0, n, 2)]
x = torch.full((2,), float(rank), device="npu")
dist.all_reduce(x, group=pairs[rank // 2])
same("sub-group", x, [4.0 * (rank // 2) + 1] * 2)

for count in (4, 200000):
    if rank == 0:
        dist.send(torch.full((count,), 7.0).npu(), 1)
    elif rank == 1:
        x = torch.zeros(count, device="npu")
        dist.recv(x, 0)
        assert x.cpu().unique().tolist() == [7.0]
dist.barrier()
torch.npu.synchronize()

graph, z = torch.npu.NPUGraph(), torch.ones(1024, device="npu")
with torch.npu.graph(graph):
    doubled = z * 2
    dist.all_reduce(doubled)
    result = doubled + 0.5
for step in range(5):
    z.fill_(rank + 1.0 + step)
    graph.replay()
    torch.npu.synchronize()
    assert result.cpu().unique().tolist() == [2.0 * (total + n * step) + 0.5]
graph.reset()
dist.destroy_process_group()
print("ALL DONE")
"""


def leftovers(pids: list[str]) -> list[str]:
    """Return the names of files in shared memory that the processes ``pids`` have left behind."""
    return [p.name for pid in pids for p in Path("/dev/shm").glob(f"*emulated_hccl_{pid}_*")]


one_and_two_hosts = pytest.mark.parametrize("hosts", ["a", "ab"])


@pytest.mark.parametrize(
    "ranks,hosts",
    [(2, "a"), slow(4, "a"), (2, "ab"), (4, "aabb"), slow(4, "abbb"), (4, "abcd")],
)
def test_collectives_eager_and_captured(run_ranks, ranks):
    for status, output in run_ranks(ALL, ranks):
        assert status == 0 and "ALL DONE" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["a"])
def test_collectives_of_programs_that_load_for_themselves(run_ranks):
    """The ranks are new processes, not forks, so this test also covers imports and exits."""
    for status, output in run_ranks(ALL, 2, fresh=True):
        assert status == 0 and "ALL DONE" in output, output


CAPTURED = """
dist.init_process_group("hccl")
n = dist.get_world_size()
sizes = [[(a + b) % 3 for b in range(n)] for a in range(n)]
receive = [sizes[r][rank] for r in range(n)]
x = torch.zeros(n * 6, device="npu")
scattered, gathered = torch.empty(6, device="npu"), torch.empty(n * n * 6, device="npu")
turned = torch.empty(n * 6, device="npu")
split = torch.empty(sum(receive), device="npu")

def run():
    dist.reduce_scatter_tensor(scattered, x)
    dist.all_gather_into_tensor(gathered, x)
    dist.all_to_all_single(turned, x)
    dist.all_to_all_single(split, x[:sum(sizes[rank])], receive, sizes[rank])

def results():
    torch.npu.synchronize()
    return [t.cpu().clone() for t in (scattered, gathered, turned, split)]

def fill(step):
    x.copy_(torch.arange(n * 6) + 100.0 * rank + 1000 * step)

fill(0)
run()
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    run()
for step in (1, 2):
    fill(step)
    graph.replay()
    replayed = results()
    mine = [torch.arange(n * 6) + 100.0 * r + 1000 * step for r in range(n)]
    assert torch.equal(replayed[0], sum(mine)[6 * rank:6 * rank + 6])
    assert torch.equal(replayed[1], torch.cat(mine))
    assert torch.equal(replayed[2], torch.cat([t[6 * rank:6 * rank + 6] for t in mine]))
    starts = [sum(sizes[r][:rank]) for r in range(n)]
    want = [t[s:s + c] for t, s, c in zip(mine, starts, receive)]
    assert torch.equal(replayed[3], torch.cat(want))
print("ALL DONE")
os._exit(0)
"""


@pytest.mark.parametrize("ranks,hosts", [(2, "a"), (4, "a"), (4, "abab")])
def test_collectives_of_shared_contexts_can_be_captured(run_ranks, ranks):
    """The captured collectives are reduce-scatter, all-gather, and all-to-all, both with equal
    sizes and with given sizes.
    """
    for status, output in run_ranks(CAPTURED, ranks):
        assert status == 0 and "ALL DONE" in output, output


@pytest.mark.parametrize("hosts", ["a", "aab", "abc"])
@pytest.mark.parametrize("count", [5, 200000])
def test_batches_of_sends_and_receives_wait_in_no_ring(run_ranks, count):
    """Each rank first sends more data to both neighbours than a mailbox can hold, and then
    receives.
    """
    results = run_ranks(
        f"""
        count = {count}
        dist.init_process_group("hccl")
        n = dist.get_world_size()
        after, before = (rank + 1) % n, (rank - 1) % n
        sent = torch.full((count,), float(rank)).npu()
        got = [torch.zeros(count).npu() for _ in range(2)]
        calls = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.isend, sent + 10, before),
                 dist.P2POp(dist.irecv, got[0], before), dist.P2POp(dist.irecv, got[1], after)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        torch.npu.synchronize()
        assert got[0].cpu().unique().tolist() == [float(before)]
        assert got[1].cpu().unique().tolist() == [after + 10.0]
        print("ALL DONE")
        os._exit(0)
        """,
        3,
    )
    for status, output in results:
        assert status == 0 and "ALL DONE" in output, output


def test_sends_and_receives_of_a_group_wait_in_no_ring(run_ranks):
    results = run_ranks(
        """
        from torch.distributed.distributed_c10d import _coalescing_manager
        dist.init_process_group("hccl")
        peer, count = 1 - rank, 300_000
        got, sums = torch.zeros(count).npu(), torch.ones(count).npu()
        with _coalescing_manager(device=torch.device("npu", rank), async_ops=True) as works:
            dist.isend(torch.full((count,), float(rank)).npu(), peer)
            dist.irecv(got, peer)
        works.wait()
        with _coalescing_manager():
            dist.all_reduce(sums)
        torch.npu.synchronize()
        assert got.cpu().unique().tolist() == [float(peer)]
        assert sums.cpu().unique().tolist() == [2.0]
        print("ALL DONE")
        os._exit(0)
        """,
        2,
        hccl_s=10,
    )
    for status, output in results:
        assert status == 0 and "ALL DONE" in output, output


@one_and_two_hosts
def test_a_mismatch_is_reported_by_both_ranks(run_ranks):
    results = run_ranks(
        """
        dist.init_process_group("hccl")
        dist.all_reduce(torch.ones(8 if rank == 0 else 4).npu())
        torch.npu.synchronize()
        """,
        2,
    )
    for status, output in results:
        assert status != 0
        assert "HCCL mismatch: rank" in output
        assert "AllReduce count=8" in output and "AllReduce count=4" in output


@one_and_two_hosts
def test_an_absent_rank_is_named_after_the_limit(run_ranks):
    results = run_ranks(
        """
        dist.init_process_group("hccl")
        dist.all_reduce(torch.ones(8).npu())
        torch.npu.synchronize()
        store = dist.distributed_c10d._get_default_store()
        try:
            if rank == 0:
                dist.all_reduce(torch.ones(8).npu())
                torch.npu.synchronize()
        except RuntimeError as e:
            print(e)
            store.set("over", "")
        if rank == 1:  # there, and absent from the collective
            store.wait(["over"])
        os._exit(0)
        """,
        2,
        hccl_s=2,
    )
    assert "HCCL timeout after 2 s: rank 0 of 2 in AllReduce" in results[0][1]
    assert "waits for rank 1" in results[0][1]


@one_and_two_hosts
def test_a_killed_rank_is_reported_without_waiting_for_the_limit(run_ranks):
    results = run_ranks(
        """
        dist.init_process_group("hccl")
        x = torch.ones(8).npu()
        dist.all_reduce(x)
        torch.npu.synchronize()
        print("PROCESS", os.getpid())
        if rank == 1:
            os.kill(os.getpid(), 9)
        try:
            dist.all_reduce(x)
            torch.npu.synchronize()
        except RuntimeError as e:
            print(e)
        os._exit(0)
        """,
        2,
        hccl_s=600,  # so long that this limit does not end the wait
    )
    assert "HCCL: rank 1 of 2 is dead" in results[0][1], results[0][1]
    assert leftovers([re.search(r"PROCESS (\d+)", output)[1] for _, output in results]) == []


def test_domains_hold_streams_and_captures_take_more(run_ranks):
    results = run_ranks(
        """
        import ctypes
        runtime = ctypes.CDLL("libascendcl.so")
        def available():
            count = ctypes.c_uint32()
            runtime.aclrtGetStreamAvailableNum(ctypes.byref(count))
            return count.value
        dist.init_process_group("hccl")
        x = torch.ones(8).npu()
        dist.all_reduce(x)
        torch.npu.synchronize()
        def capture(body):
            before = available()
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph):
                body()
            taken = before - available()
            graph.reset()
            return taken
        capture(lambda: dist.all_reduce(x))
        print("TAKEN", capture(lambda: x + 1), capture(lambda: dist.all_reduce(x)))
        os._exit(0)
        """,
        2,
        hccl_streams_per_domain=5,
    )
    for _, output in results:
        plain, collective = re.search(r"TAKEN (\d+) (\d+)", output).groups()
        assert int(plain) == 1 and int(collective) >= 1 + 5


@pytest.mark.parametrize("expansion", ["AIV", "FFTS", "AICPU"])
def test_the_streams_of_a_domain_follow_the_expansion_mode(run_ranks, expansion):
    results = run_ranks(
        """
        from dist_aclgraph.planning.budget.domains import streams_per_domain, streams_per_graph
        expansion = json.loads(os.environ["SCRIPT_SETTINGS"])["hccl_expansion"]
        dist.init_process_group("hccl")
        x = torch.ones(8).npu()
        torch.npu.synchronize()
        graphs = []
        for ranks in ([0, 1], [0, 1, 2], [0, 1, 2, 3]):
            group = dist.new_group(ranks)
            if rank not in ranks:
                continue
            before = emulator.counters()
            dist.all_reduce(x, group=group)
            torch.npu.synchronize()
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph):
                dist.all_reduce(x, group=group)
                dist.all_reduce(x, group=group)
            graphs.append(graph)
            after = emulator.counters()
            want = {
                "domains": streams_per_domain(expansion, len(ranks)),
                "graph_domains": streams_per_graph(expansion),
            }
            found = {owner: after[owner] - before[owner] for owner in want}
            assert found == want, (ranks, before, after)
        dist.barrier()
        for graph in graphs:
            graph.reset()
        assert emulator.counters()["graph_domains"] == 0
        dist.destroy_process_group()
        assert emulator.counters()["domains"] == 0
        print("ALL DONE")
        """,
        4,
        hccl_expansion=expansion,
    )
    for status, output in results:
        assert status == 0 and "ALL DONE" in output, output


def test_latency_of_a_small_all_reduce_is_printed(run_ranks):
    start = time.time()
    results = run_ranks(
        """
        dist.init_process_group("hccl")
        x = torch.ones(1024).npu()
        dist.all_reduce(x)
        torch.npu.synchronize()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            dist.all_reduce(x)
        times = []
        for _ in range(200):
            begin = time.perf_counter()
            graph.replay()
            torch.npu.synchronize()
            times.append(time.perf_counter() - begin)
        print("MEDIAN", round(sorted(times)[100] * 1e3, 3))
        os._exit(0)
        """,
        8,
        devices=8,
    )
    medians = [re.search(r"MEDIAN ([\d.]+)", output)[1] for _, output in results]
    print(f"4 KB all_reduce of 8 ranks, ms: {medians}; {time.time() - start:.0f} s in all")


@one_and_two_hosts
def test_bytes_that_collectives_bring_from_other_ranks_are_counted(run_ranks):
    results = run_ranks(
        """
        dist.init_process_group("hccl")
        n, size = 4, 4 * 60
        x, whole = torch.zeros(60).npu(), torch.zeros(n * 60).npu()

        def moved(call):
            torch.npu.synchronize()
            before = emulator.counters()["collective_bytes"]
            call()
            torch.npu.synchronize()
            return emulator.counters()["collective_bytes"] - before

        def replayed():
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph):
                dist.all_gather_into_tensor(whole, x)
            torch.npu.synchronize()
            count = moved(lambda: (graph.replay(), graph.replay()))
            dist.barrier()
            graph.reset()
            return count

        def exchanged():
            received, given = n * (rank + 1), [1, 2, 3, 4]
            out, mine = x[:received], x[:10].clone()
            dist.all_to_all_single(out, mine, [rank + 1] * n, given)

        def sent():
            if rank == 0:
                dist.send(x, 1)
            if rank == 1:
                dist.recv(x, 0)

        counted = [
            moved(lambda: dist.all_reduce(x)),
            moved(lambda: dist.all_gather_into_tensor(whole, x)),
            moved(lambda: dist.reduce_scatter_tensor(x, whole)),
            moved(lambda: dist.all_to_all_single(x, x.clone())),
            moved(lambda: dist.broadcast(x, 2)),
            moved(exchanged),
            moved(sent),
            replayed(),
        ]
        want = [
            2 * 3 * size // 4,
            3 * size,
            3 * size,
            3 * size // 4,
            0 if rank == 2 else size,
            3 * 4 * (rank + 1),
            size if rank == 1 else 0,
            2 * 3 * size,
        ]
        assert counted == want, (rank, counted, want)
        dist.barrier()
        print("COUNTED")
        os._exit(0)
        """,
        4,
    )
    for status, output in results:
        assert status == 0 and "COUNTED" in output, output
