"""Calls of torch_npu can abort the tasks of a device. The tests show which state is lost, which
state remains, and how ranks continue afterwards.
"""

import re

import pytest

from tests.slow import slow

# The beginning of each script. It captures a graph with a collective that has run before, and
# defines the three calls for recovery.
RANKS = """
dist.init_process_group("hccl")
x, out = torch.ones(64, device="npu"), torch.zeros(64, device="npu")
def step():
    y = x * 2
    dist.all_reduce(y)
    out.copy_(y)
step()
torch.npu.synchronize()
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    step()
kept = torch.arange(8.0).npu()

def attempt(what, body):
    try:
        body()
        print(what, "FINE", flush=True)
    except RuntimeError as e:
        print(what, "FAILED", str(e).replace(chr(10), " "), flush=True)
def replay(value):
    x.fill_(value)
    graph.replay()
    torch.npu.synchronize()
def meet(name, waits=True):
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}{rank}", b"1")
    if waits:
        store.wait([f"{name}{r}" for r in range(dist.get_world_size())])
def stop():
    assert torch.npu.stop_device(rank) == 0
def restart():
    torch.npu.restart_device(rank)
    torch_npu.distributed.reinit_process_group(None, False)
def leave():
    meet("end", waits=rank == 0)  # which has the store
    os._exit(0)
"""


def finished(results: list[tuple[int, str]]) -> list[str]:
    for status, output in results:
        assert status == 0, output
    return [output for _, output in results]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("fail", "507015"),
        ("link", "HCCS LINK ERROR"),
        ("remote", "SUSPECT REMOTE ERROR"),
        ("retry", "HCCL OP RETRY FAILED"),
        ("memory", "SUSPECT MEM ERROR"),
        ("ecc", "HBM MULTI BIT ECC ERROR"),
    ],
)
def test_a_graph_with_a_collective_goes_on_after_all_ranks_have_aborted(run_ranks, kind, text):
    results = run_ranks(
        RANKS
        + """
replay(3.0)
import threading
if rank == 0:  # waits for a peer that never comes
    waits = threading.Thread(target=attempt, args=("WAIT", lambda: replay(4.0)))
    waits.start()
    time.sleep(0.5)
    assert waits.is_alive()
else:
    attempt("FAULT", lambda: replay(4.0))
meet("failed")
stop()
if rank == 0:
    waits.join(180)
meet("stopped")
restart()
meet("restarted")
before = emulator.counters()["graphs"]
replay(5.0)
print("GRAPHS", before, "KEPT", kept.tolist() == list(range(8)))
print("SUM", out.cpu().unique().tolist(), flush=True)
step()
print("EAGER", out.cpu().unique().tolist(), flush=True)
leave()
""",
        2,
        fault_op="HcclAllReduce",
        fault_call=3,
        fault_rank=1,
        fault_kind=kind,
    )
    first, second = finished(results)
    assert re.search("WAIT FAILED .*FORCE STOP", first), first
    assert re.search(f"FAULT FAILED .*{text}", second), second
    for output in (first, second):
        assert "GRAPHS 1 KEPT True" in output
        assert "SUM [20.0]" in output and "EAGER [20.0]" in output


BETWEEN_HOSTS = """
import threading
big, sums = torch.ones(3 << 20, device="npu"), []
def reduce(value):
    big.fill_(value)
    dist.all_reduce(big)
    torch.npu.synchronize()
    sums.append(big.cpu().unique().tolist())
def send(value):
    if rank in (0, 3):
        part = torch.full((1 << 20,), value, device="npu")
        (dist.send if rank == 0 else dist.recv)(part, 3 - rank)
        torch.npu.synchronize()
        sums.append(part[:1].tolist())
reduce(1.0)
send(5.0)
for life in range(2):
    def work():  # of which a part lies in sockets when it is aborted: one rank never comes
        torch.npu.set_device(rank)
        attempt("WAIT", lambda: dist.send(big, 3) if life else reduce(2.0))
    works = rank == 0 if life else rank != 1
    waits = threading.Thread(target=work)
    if works:
        waits.start()
    time.sleep(1)
    meet(f"failed{life}")
    stop()
    if works:
        waits.join(180)
    meet(f"stopped{life}")
    restart()
    reduce(3.0 + life)
    send(6.0 + life)
print("SUMS", sums, flush=True)
leave()
"""


@pytest.mark.parametrize("hosts", ["aabb", slow("abcd")])
def test_ranks_of_several_hosts_go_on_behind_what_lies_in_their_sockets(start_ranks, hosts):
    results = [script.finish(120) for script in start_ranks(RANKS + BETWEEN_HOSTS, 4, hosts=hosts)]
    for rank, output in enumerate(finished(results)):
        sums = [[4.0], [12.0], [16.0]]
        sent = [[5.0], [6.0], [7.0]]
        both = [value for pair in zip(sums, sent, strict=True) for value in pair]
        assert f"SUMS {both if rank in (0, 3) else sums}" in output, output


def test_a_message_that_is_aborted_before_its_receiver_reads_it_never_arrives(run_ranks):
    """HCCL has two sets of counters. At each abort, it switches to the other set.

    A counter that an abort does not reset causes an error only when HCCL uses the counter's set
    again. So the test aborts several times.
    """
    results = run_ranks(
        RANKS
        + """
part, got = torch.empty(8, device="npu"), []
def send(value):  # it ends without a receiver, as the message fits into the mailbox
    part.fill_(value)
    dist.send(part, 1)
    torch.npu.synchronize()
def pass_on(value):
    if rank == 0:
        send(value)
    else:
        dist.recv(part, 0)
        got.append(part.tolist()[0])
pass_on(1.0)
for life in range(3):
    if rank == 0:
        send(100.0)
    meet(f"sent{life}")
    stop()
    meet(f"stopped{life}")
    restart()
    meet(f"restarted{life}")
    pass_on(2.0 + life)
print("GOT", got, flush=True)
leave()
""",
        2,
    )
    _, second = finished(results)
    assert "GOT [1.0, 2.0, 3.0, 4.0]" in second, second


def test_a_rank_that_resumes_before_a_peer_has_aborted_is_refused(run_ranks):
    results = run_ranks(
        RANKS
        + """
replay(3.0)
if rank == 0:
    stop()
    attempt("EARLY", restart)
    meet("tried")
else:
    meet("tried")
    stop()
meet("stopped")
restart()
meet("restarted")
replay(7.0)
print("SUM", out.cpu().unique().tolist(), flush=True)
leave()
""",
        2,
    )
    first, second = finished(results)
    assert re.search("EARLY FAILED .*rank 1 has not aborted its tasks", first), first
    assert "SUM [28.0]" in first and "SUM [28.0]" in second


def test_a_stopped_device_refuses_work_and_a_suspended_communicator_calls(run_ranks):
    results = run_ranks(
        RANKS
        + """
replay(3.0)
stop()
attempt("STOPPED", lambda: torch.npu.restart_device(rank))
attempt("OPERATOR", lambda: (x + 1).cpu())
attempt("SUSPENDED", lambda: dist.all_reduce(x))
attempt("GRAPH", lambda: replay(1.0))
leave()
""",
        2,
    )
    for output in finished(results):
        assert "OPERATOR FINE" in output
        assert re.search("SUSPENDED FAILED .*communicator .* is suspended", output), output
        assert re.search("GRAPH FAILED .*communicator .* is suspended", output), output


def test_queued_work_is_gone_and_events_that_waited_for_it_are_over(run_script):
    status, output = run_script(
        """
        x = torch.zeros(4).npu()
        other = torch.npu.Stream()
        torch.npu.synchronize()
        event = torch.npu.Event()
        x.cumsum(0)  # stalls
        for _ in range(5):
            x.add_(1)
        event.record()
        other.wait_event(event)
        print("QUEUED", event.query())
        begin = time.monotonic()
        assert torch.npu.stop_device(0) == 0
        torch.npu.restart_device(0)
        event.synchronize()
        other.synchronize()
        print("OVER", event.query(), time.monotonic() - begin < 30, x.tolist())
        """,
        fault_op="aclnnCumsum",
        fault_kind="stall",
        stall_s=60,
    )
    assert status == 0, output
    assert "QUEUED False" in output and "OVER True True [0.0, 0.0, 0.0, 0.0]" in output


def test_a_graph_over_a_destroyed_communicator_names_both(run_ranks):
    results = run_ranks(
        RANKS
        + """
replay(3.0)
time.sleep(rank)  # which must not matter
torch_npu.distributed.reinit_process_group(None, True)
meet("left")  # a rank that leaves deletes the key by which a new communicator is found
step()  # makes a new one
torch.npu.synchronize()
attempt("REPLAY", lambda: replay(4.0))
leave()
""",
        2,
    )
    for output in finished(results):
        assert re.search(
            r"REPLAY FAILED .*of graph \d+, HcclAllReduce: communicator \S+ was destroyed", output
        ), output


def test_an_abort_that_fails_leaves_the_device_stopped(run_script):
    status, output = run_script(
        """
        x = torch.zeros(4).npu()
        torch.npu.synchronize()
        print("ABORTS", torch.npu.stop_device(0))
        torch.npu.restart_device(0)
        try:
            (x + 1).cpu()
        except RuntimeError as e:
            print("THEN", str(e).replace(chr(10), " "))
        print("AGAIN", torch.npu.stop_device(0))
        torch.npu.restart_device(0)
        print("FINE", (x + 1).tolist())
        """,
        fault_op="aclrtDeviceTaskAbort",
    )
    assert status == 0, output
    assert "ABORTS 1" in output and re.search("THEN .*FORCE STOP", output), output
    assert "AGAIN 0" in output and "FINE [1.0, 1.0, 1.0, 1.0]" in output


LAUNCHES_BEHIND = """
import ctypes
from dist_aclgraph.device.npu import Npu
acl, THREAD_LEVEL = ctypes.CDLL("libascendcl.so"), 0
npu, of_hccl = Npu("emulated"), RuntimeError("HcclAllreduce, error code is 15")
print("BEFORE", acl.aclrtPeekAtLastError(THREAD_LEVEL), npu.fault_of(of_hccl))
kept.cumsum(0)
time.sleep(0.5)
attempt("LAUNCH", lambda: kept.add_(1))
codes = [acl.aclrtPeekAtLastError(THREAD_LEVEL) for _ in range(2)]
print("CODES", codes, npu.fault_of(of_hccl), acl.aclrtGetLastError(THREAD_LEVEL), flush=True)
leave()
"""


@pytest.mark.parametrize(
    ("kind", "said", "code", "fault"),
    [
        ("fail", "error code is 507015", 507015, "operator"),
        ("link", "HCCS LINK ERROR, error code is 507056", 507056, "link"),
    ],
)
def test_where_a_library_cannot_launch_the_runtime_knows_why(run_ranks, kind, said, code, fault):
    """HCCL returns the same error code for every call that the runtime refuses. torch_npu then
    queries the runtime's error code, and has texts for some of these codes.
    """
    faults = {"fault_op": "aclnnCumsum", "fault_call": 1, "fault_kind": kind}

    for output in finished(run_ranks(RANKS + LAUNCHES_BEHIND, 2, **faults)):
        assert "BEFORE 0 None" in output
        assert re.search(f"LAUNCH FAILED .*{said}", output), output
        assert f"CODES [{code}, {code}] {fault} 0" in output
