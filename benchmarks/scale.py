"""``make bench-scale``: the work of an engine in one step, for groups with 8 to 1,024 workers.

The bench uses a deployment's scheduler, messages and sockets. One process simulates all workers,
without devices and without a model. All requests decode, and their KV blocks become full in
different steps. In one half of the runs, all workers are on the engine's node (Unix sockets); in
the other half, all workers are on other nodes (ZeroMQ over TCP with CURVE). CPU time is the sum
over all threads of the engine's process.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.progress import Progress

from benchmarks.common.command import report_bench, run_command
from benchmarks.common.report import Report, make_table
from benchmarks.processes import scale_workers
from benchmarks.scheduler import BLOCK_SIZE, hand_out, make_scheduler
from dist_aclgraph.actors.wire.addresses import Place
from dist_aclgraph.actors.wire.step_channel import StepSender
from dist_aclgraph.steps.step import Shutdown, StepPlan, encoder
from dist_aclgraph.topology import GroupRank, WorldRank

NODE, OTHER_NODE, HOST = "node", "other node", "127.0.0.1"
CONNECT_S, STEP_S = 120.0, 60.0
WARM_UP = 5  # steps before the measurement
GOAL_RANKS = 320
GOAL_ENGINE_MS, GOAL_SEND_MS = 5.0, 10.0

COLUMNS = {
    "workers": "{workers}",
    "dp x tp": "{dp} x {tp}",
    "requests": "{requests}",
    "engine": "{engine_ms:.2f}",
    "bytes": "{plan_bytes}",
    "of each": "{rank_bytes}",
    "send, Unix": "{unix[send_ms]:.2f}",
    "send, CURVE": "{curve[send_ms]:.2f}",
    "receive, Unix": "{unix[receive_ms]:.2f}",
    "receive, CURVE": "{curve[receive_ms]:.2f}",
}


class Shape(NamedTuple):
    """The shape of a group: its number of data-parallel ranks, and the number of workers of each of
    these ranks.
    """

    dp: int
    tp: int

    @classmethod
    def of(cls, text: str) -> Shape:
        dp, tp = text.split("x")
        return cls(int(dp), int(tp))


@dataclass(frozen=True)
class Workers:
    """The process that simulates all workers of a group."""

    process: subprocess.Popen[str]

    def wait(self) -> None:
        """Wait until every worker has received its message."""
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def answer(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def main(
    shapes: Annotated[str, typer.Option(help="DP ranks x TP ranks.")] = (
        "8x1,64x1,320x1,1024x1,8x8,40x8"
    ),
    requests: Annotated[int, typer.Option(help="Of each DP rank.")] = 16,
    steps: Annotated[int, typer.Option(help="Of a row and a way.")] = 100,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
) -> None:
    """Measure, print and save."""
    wanted = [Shape.of(text) for text in shapes.split(",")]
    report_bench(
        "scale", out, lambda folder, bar: measure(folder, bar, wanted, requests, steps), report
    )


def measure(
    folder: Path, bar: Progress, shapes: Sequence[Shape], requests: int, steps: int
) -> dict[str, Any]:
    """Return a row for each shape of a group."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    task = bar.add_task("", total=2 * len(shapes))
    rows = []
    for shape in shapes:
        row: dict[str, Any] = {**shape._asdict(), "workers": shape.dp * shape.tp}
        for way, host in (("unix", None), ("curve", HOST)):
            bar.update(task, description=f"{shape.dp} x {shape.tp} workers, {way}")
            directory = folder / f"{way}-{shape.dp}-{shape.tp}"
            directory.mkdir()
            row |= run(Place(NODE, str(directory), host), shape, requests, steps, way)
            bar.advance(task)
        rows.append(row)
    return {"rows": rows, "steps": steps, "note": "workers are played, without devices and model"}


def run(place: Place, shape: Shape, requests: int, steps: int, way: str) -> dict[str, Any]:
    """Run steps of one group. Return the medians over these steps."""
    scheduler, recipients = make_scheduler(
        requests, steps + WARM_UP, num_ranks=shape.dp, tp=shape.tp, spread=BLOCK_SIZE - 1
    )
    world_ranks = [WorldRank(rank) for rank in range(shape.dp * shape.tp)]
    sender = StepSender(world_ranks, place, ranks_per_batch=shape.tp)
    engine_ns, send_ns, receive_ns = [], [], []
    node_id = NODE if place.host is None else OTHER_NODE
    gc.collect()
    gc.freeze()  # as in a real engine: garbage collections skip the present objects
    with played_workers(sender, node_id, shape) as workers:
        for _ in range(steps + WARM_UP):
            began = time.thread_time_ns()
            plan = scheduler.schedule()
            scheduled = time.thread_time_ns()
            assert plan is not None
            before = time.process_time_ns()
            sender.send(plan)
            workers.wait()
            sent = time.process_time_ns()
            workers.answer()
            results = sender.receive(plan, STEP_S, lambda: None)
            received = time.process_time_ns()
            updating = time.thread_time_ns()
            outputs = scheduler.update(results)
            updated = time.thread_time_ns()
            engine_ns.append(scheduled - began + updated - updating + hand_out(recipients, outputs))
            send_ns.append(sent - before)
            receive_ns.append(received - sent)
    gc.unfreeze()
    assert plan is not None
    return {
        "requests": requests * shape.dp,
        "engine_ms": median_ms(engine_ns),
        way: {"send_ms": median_ms(send_ns), "receive_ms": median_ms(receive_ns)},
        **sizes(plan, shape),
    }


def median_ms(times_ns: Sequence[int]) -> float:
    """Return the median of the times in milliseconds. The first ``WARM_UP`` times are ignored."""
    return statistics.median(times_ns[WARM_UP:]) / 1e6


def sizes(plan: StepPlan, shape: Shape) -> dict[str, int]:
    """Return two sizes in bytes: of a step's messages to all workers, and of the message to one
    worker.
    """
    sent = [len(encoder.encode(plan.for_rank(rank))) for rank in range(shape.dp)]
    return {"plan_bytes": sum(sent) * shape.tp, "rank_bytes": max(sent)}


@contextmanager
def played_workers(sender: StepSender, node_id: str, shape: Shape) -> Iterator[Workers]:
    """Start the process that simulates the workers. End it when the context ends."""
    command = [sys.executable, "-m", scale_workers.__name__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    try:
        ranks = map(GroupRank, range(shape.dp * shape.tp))
        addresses = [scale_workers.written(sender.address_for(node_id, rank)) for rank in ranks]
        process.stdin.write(json.dumps(addresses) + "\n")
        process.stdin.flush()
        sender.wait_for_workers(CONNECT_S, lambda: None)
        workers = Workers(process)
        yield workers
        sender.send(Shutdown(0))
        workers.wait()
    finally:
        sender.close(0)
        process.kill()
        process.wait()


def report(results: dict[str, Any]) -> Report:
    return Report(
        f"Medians of {results['steps']} steps",
        [
            make_table(
                "A decode step on the engine's host: ms of CPU time", COLUMNS, results["rows"]
            )
        ],
        f"Aim: with {GOAL_RANKS} ranks, {GOAL_ENGINE_MS:g} ms for the engine's own work and "
        f"{GOAL_SEND_MS:g} ms for sending to other nodes.",
    )


if __name__ == "__main__":
    run_command(main)
