"""Questions about the abort of a device's work, and about work after the abort.

These questions are asked last, because an NPU that does not recover cannot answer further
questions.
"""

from __future__ import annotations

import os
import select
import signal
from typing import Any

from dist_aclgraph.probe.question import ACCEPTED, REFUSED, STOPPED, Answer, Bench, ByCann, Probe
from dist_aclgraph.probe.questions.collectives import captured_sum, mc2
from dist_aclgraph.probe.questions.graphs import captured

ABORT_S = 20.0


def _memory_stays(bench: Bench) -> Answer:
    torch = bench.torch
    kept = torch.arange(1024.0).npu()
    torch.npu.synchronize()
    bench.npu.stop(ABORT_S)
    bench.npu.restart(resumes_groups=False)
    return bench.compare(kept + 1, torch.arange(1024.0) + 1)


def _graph_stays(bench: Bench) -> Answer:
    torch = bench.torch
    x = torch.ones(64, device="npu")
    graph, y = captured(bench, lambda: x * 2)
    graph.replay()
    torch.npu.synchronize()
    bench.npu.stop(ABORT_S)
    bench.npu.restart(resumes_groups=False)
    x.fill_(7.0)
    graph.replay()
    return bench.compare(y, torch.full((64,), 14.0))


def _meet(bench: Bench, name: str) -> None:
    store: Any = bench.torch.distributed.distributed_c10d._get_default_store()
    store.set(f"{name}{bench.rank}", b"1")
    store.wait([f"{name}{rank}" for rank in range(bench.ranks)])


def _graph_with_collective_stays(bench: Bench) -> Answer:
    graph, x, out = captured_sum(bench)
    graph.replay()
    bench.synchronize()
    _meet(bench, "replayed")
    bench.npu.stop(ABORT_S)
    _meet(bench, "stopped")
    bench.npu.restart()
    _meet(bench, "restarted")
    x.fill_(5.0)
    graph.replay()
    return bench.compare(out, bench.torch.full((64,), 10.0 * bench.ranks))


def _stuck_stream(bench: Bench) -> str:
    """Abort a stream that waits for an event that is never recorded."""
    torch = bench.torch
    torch.ones(4, device="npu")
    event = torch.npu.ExternalEvent()
    torch.npu.synchronize()
    event.wait(torch.npu.current_stream())
    bench.npu.stop(ABORT_S)
    bench.npu.restart(resumes_groups=False)
    torch.npu.synchronize()
    return ACCEPTED


def _work_after_stop(bench: Bench) -> str:
    """Launch work after an abort and before the restart."""
    torch = bench.torch
    x = torch.ones(4, device="npu")
    torch.npu.synchronize()
    bench.npu.stop(ABORT_S)
    (x + 1).cpu()
    return ACCEPTED


def _batch_beyond_buffer(bench: Bench) -> Answer:
    """Send, by MC2, a batch that needs more than the 200 MB of HCCL's buffer."""
    return mc2(bench, num_tokens=256, hidden=7168, num_experts=512, top_k=16)


def _destroy_beside_dead(bench: Bench) -> str:
    """Destroy a communicator after another member of the communicator has died."""
    torch = bench.torch
    torch.distributed.all_reduce(torch.ones(64, device="npu"))
    bench.synchronize()
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    if bench.rank == 1:
        store.set("pid", str(os.getpid()))
        store.wait(["watched"])
        os.kill(os.getpid(), signal.SIGKILL)
    process = os.pidfd_open(int(store.get("pid")))
    store.set("watched", b"1")
    select.select([process], [], [])
    torch.distributed.destroy_process_group()
    return ACCEPTED


PROBES = (
    Probe("aborts.memory_stays", "Does memory outlive an abort?", _memory_stays, "equal"),
    Probe("aborts.graph_stays", "Does a graph outlive an abort?", _graph_stays, "equal"),
    Probe(
        "aborts.graph_with_collective_stays",
        "Does a graph with a collective outlive an abort of both ranks?",
        _graph_with_collective_stays,
        "equal",
        ranks=2,
    ),
    Probe(
        "aborts.stuck_stream",
        "Does an abort free a stream that waits for ever?",
        _stuck_stream,
        ACCEPTED,
    ),
    Probe(
        "aborts.work_after_stop",
        "Is work refused between an abort and the restart?",
        _work_after_stop,
        REFUSED,
    ),
    Probe(
        "aborts.destroy_beside_dead",
        "Can a communicator be destroyed after the death of another member?",
        _destroy_beside_dead,
        "rank 0: accepted; rank 1: the process died",
        ranks=2,
    ),
    Probe(
        "aborts.mc2_beyond_buffer",
        "Does MC2 refuse a batch that needs more than the 200 MB of HCCL's buffer?",
        _batch_beyond_buffer,
        ByCann(REFUSED, REFUSED, a2_cann_8=REFUSED, a2_cann_9=STOPPED),
        ranks=2,
    ),
)
