"""``make bench-messages``: the time to send a plan to all workers of a node and to receive their
results.

Workers are processes that decode a plan and reply at once. The bench measures three ways
alternately in one run. First, an engine uses Unix sockets, which a real engine uses for workers on
its own node. Second, an engine uses ZeroMQ's sockets, which a real engine uses for workers on other
nodes. In the bench, ZeroMQ's sockets are files. Third, bare sockets send the same number of bytes,
which no process decodes: this is the lower bound. CPU time is the sum over all processes, including
the engine. Wall time is meaningful only on a quiet machine.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.common.command import numbers, report_bench, run_command
from benchmarks.common.report import Report, draw_bars, make_table, sheet
from benchmarks.processes import messages_worker
from benchmarks.processes.messages_floor import BarePeers
from benchmarks.serve import cpu_seconds
from dist_aclgraph.actors.wire.addresses import Place
from dist_aclgraph.actors.wire.local_steps import LocalPeers, SocketFile
from dist_aclgraph.actors.wire.remote_steps import Endpoints, RemotePeers
from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.steps.step import (
    RankBatch,
    Shutdown,
    StepPlan,
    StepResult,
    encoder,
    from_worker_decoder,
)

NODE = "node"
WAIT_S = 1.0
PAUSE_S = 0.002  # seconds between two steps, in which all processes become idle
GOAL_MS, GOAL_WORKERS = 0.4, 8
RECORD_BYTES = 16  # number of bytes that a request takes in a plan

COLUMNS = {
    "way": "{way}",
    "workers": "{workers}",
    "plan, bytes": "{bytes}",
    "p10, us": "{p10_us:.0f}",
    "p50, us": "{p50_us:.0f}",
    "p90, us": "{p90_us:.0f}",
    "CPU us a step": "{cpu_us:.0f}",
}

Peers = LocalPeers | RemotePeers | BarePeers


@dataclass(frozen=True)
class Way:
    """A group of workers, which the bench reaches over one kind of socket."""

    name: str
    peers: Peers
    pids: tuple[int, ...]

    def step(self, plan: StepPlan) -> float:
        """Send a plan. Return the number of seconds until all workers have sent their results."""
        began_s = time.perf_counter()
        if isinstance(self.peers, BarePeers):
            self.peers.round(encoder.encode(plan.for_rank(0)))
            return time.perf_counter() - began_s
        self.peers.send([encoder.encode(plan.for_rank(0))])
        for _ in self.pids:
            result = from_worker_decoder.decode(receive(self.peers))
            assert isinstance(result, StepResult) and result.step == plan.step
        return time.perf_counter() - began_s


def receive(peers: LocalPeers | RemotePeers) -> bytes:
    """Return the next frame that any worker has sent."""
    while (frame := peers.poll_frame()) is None:
        peers.wait(WAIT_S)
    return frame


def main(
    workers: Annotated[str, typer.Option(help="Ranks of a group.")] = "1,2,4,8",
    plan_bytes: Annotated[str, typer.Option(help="Sizes of a plan.")] = "512,8192",
    steps: Annotated[int, typer.Option(help="Of a turn.")] = 100,
    repeats: Annotated[int, typer.Option(help="Rounds.")] = 6,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
) -> None:
    """Measure, print and save."""
    counts, sizes = numbers(workers), numbers(plan_bytes)
    report_bench(
        "messages",
        out,
        lambda folder, bar: measure(folder, bar, counts, sizes, steps, repeats),
        report,
        draw,
    )


def measure(
    folder: Path,
    bar: Progress,
    counts: Sequence[int],
    sizes: Sequence[int],
    steps: int,
    rounds: int,
) -> dict[str, Any]:
    """Run all ways alternately. Return a row for each way, each number of workers, and each size of
    a batch.
    """
    rows = []
    task = bar.add_task("", total=len(counts) * len(sizes) * rounds)
    for count in counts:
        bare = BarePeers(str(folder / f"bare-{count}"))
        local = LocalPeers(str(folder / "steps"))
        remote = RemotePeers(Place(NODE, str(folder)))
        with (
            workers_of("bare sockets", bare, bare.address, count) as floor,
            workers_of("Unix sockets", local, local.address, count) as files,
            workers_of("ZeroMQ", remote, remote.address_for(NODE), count) as zeromq,
        ):
            for size in sizes:
                found: dict[str, list[tuple[float, list[float]]]] = {}
                for _ in range(rounds):
                    bar.update(task, description=f"{count} workers, {size} bytes")
                    for way in (floor, files, zeromq):
                        found.setdefault(way.name, []).append(take_turn(way, size, steps))
                    bar.advance(task)
                rows += [_row(name, count, size, turns) for name, turns in found.items()]
    return {
        "rows": rows,
        "steps": steps,
        "repeats": rounds,
        "goal": {"ms": GOAL_MS, "workers": GOAL_WORKERS},
        "note": "messages alone, no device and no model",
    }


def take_turn(way: Way, size: int, steps: int) -> tuple[float, list[float]]:
    """Run steps. Return the mean CPU time of a step, and the duration of each step, in
    microseconds.
    """
    pids = (*way.pids, os.getpid())
    before_s, times_us = cpu_seconds(pids), []
    for step in range(steps):
        batch = RankBatch(pack_ints([0, 1, 2, 3] * (size // RECORD_BYTES)))
        times_us.append(way.step(StepPlan(1, step, 1, None, (batch,))) * 1e6)
        time.sleep(PAUSE_S)
    return (cpu_seconds(pids) - before_s) / steps * 1e6, times_us


@contextmanager
def workers_of(
    name: str, peers: Peers, address: SocketFile | Endpoints | str, count: int
) -> Iterator[Way]:
    """Start workers that connect to ``address``. Stop these workers when the context ends."""
    command = [sys.executable, "-m", messages_worker.__name__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    pids: tuple[int, ...] = ()
    try:
        process.stdin.write("\n".join([messages_worker.written(address)] * count))
        process.stdin.close()
        pids = tuple(json.loads(process.stdout.readline()))
        while peers.num_workers < len(pids):
            peers.wait(WAIT_S)
        yield Way(name, peers, pids)
        if not isinstance(peers, BarePeers):
            peers.send([encoder.encode(Shutdown(1))])
    finally:
        peers.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(WAIT_S)
        if process.poll() is None:  # the time limit has passed, and some workers still run
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def _row(
    name: str, count: int, size: int, turns: Sequence[tuple[float, list[float]]]
) -> dict[str, Any]:
    times = sorted(time_us for _, times_us in turns for time_us in times_us)
    return {
        "way": name,
        "workers": count,
        "bytes": size,
        "cpu_us": statistics.median(cpu_us for cpu_us, _ in turns),
        **{f"p{share}_us": times[len(times) * share // 100] for share in (10, 50, 90)},
    }


def report(results: dict[str, Any]) -> Report:
    return Report(
        f"{results['repeats']} rounds of {results['steps']} steps",
        [make_table("From a plan to the last result", COLUMNS, results["rows"])],
        f"Aim: {GOAL_MS:g} ms with {GOAL_WORKERS} workers.",
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the median time of each way as a bar, and the 10th percentile as a line.

    On a quiet machine, the 10th percentile is close to the median.
    """
    sizes = list(dict.fromkeys(row["bytes"] for row in results["rows"]))
    title = "From a plan to the last result: median (bar), p10 (line)"
    with sheet(path, results, title, (1, len(sizes)), (5.5 * len(sizes), 4.4)) as (_, charts):
        for axes, size in zip(charts, sizes, strict=True):
            draw_bars(
                axes, [row for row in results["rows"] if row["bytes"] == size],
                f"plans of {size} bytes", group="{workers} workers", series="{way}",
                height="p50_us", mark="p10_us",
                label="{p50_us:.0f}", unit="us", line=GOAL_MS * 1e3,
            )  # fmt: skip


if __name__ == "__main__":
    run_command(main)
