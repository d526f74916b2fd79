"""``make soak``: hours of load and faults, which show whether the service uses more and more
memory, files and threads.

The load and the faults are the same as in ``make chaos``. Resources are sampled only between two
faults, when all groups serve and no request runs. So all samples can be compared.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.common.command import run_command
from benchmarks.common.report import Table
from dist_aclgraph.actors.host import processes
from dist_aclgraph.errors import ConfigError
from tools.chaos import report
from tools.chaos.growth import COLUMNS, FLAT_AMOUNTS, Growth, Sample, growths, sums_over_time
from tools.chaos.outcome import Outcome
from tools.chaos.plan import Kind, make_plan
from tools.chaos.rig import Rig
from tools.chaos.service import Service
from tools.chaos.shapes import SHAPES, Shape

KINDS = (
    Kind.KILL_WORKER,
    Kind.VANISHING,
    Kind.KILL_ENGINE,
    Kind.SLOW_READERS,
    Kind.KILL_INGRESS,
    Kind.OVERLOAD,
    Kind.KILL_CONTROLLER,
)
FAULT_COLUMNS = ("fault", "tried", "requests", "lost", "differ", "longest pause, s")
MAX_FAULTS = 100_000
SHARE = 0.05  # each fault is injected before this fraction of all deltas has arrived
SAMPLES_SHOWN = 12
MIB = 1 << 20
INTRODUCTION = """\
# Soak

`make soak MINUTES=120` runs a service on the emulated NPU under the load and the faults of
[chaos.md](chaos.md): it kills workers, engines, ingress and controller, disconnects clients,
reads slowly, and sends too many requests. Between two faults, when all groups serve and no
request runs, it samples all processes of the service, the memory segments (`/dev/shm`) and the
run directories. The growth of a value is the slope of a line through its samples, from a fifth
of the run to its end. A value is flat if its growth is at most 5 %, or a small amount. `make
soak` makes this page.
"""


def _count_threads(pid: int) -> int:
    """Return how many threads a process has; 0 if there is no such process."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task"))
    return 0


def take_sample(service: Service) -> Sample:
    values: dict[tuple[str, str], float] = {}

    def add(resource: str, unit: str, value: float) -> None:
        values[resource, unit] = values.get((resource, unit), 0.0) + value

    for name, pids in service.by_name().items():
        for pid in pids:
            add(name, "processes", 1)
            add(name, "MiB", processes.resident_bytes(pid) / MIB)
            add(name, "files", processes.count_open_files(pid))
            add(name, "threads", _count_threads(pid))
    add("segments in /dev/shm", "files", len(service.segments()))
    add("run directories", "files", service.num_run_directories())
    add("temporary files", "MiB", service.temporary_bytes() / MIB)
    return Sample(time.monotonic(), values)


def soak(
    shape: Shape, seconds: float, seed: int, console: Console
) -> tuple[list[Sample], list[Outcome], list[str]]:
    """Run a service under load and faults. Return the samples, the outcomes of the faults, and the
    files and processes that remain.
    """
    max_deltas = int(SHARE * shape.num_streams * shape.num_tokens)
    plan = make_plan(seed, MAX_FAULTS, max_deltas=max_deltas, kinds=KINDS)
    samples: list[Sample] = []
    outcomes: list[Outcome] = []
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=seconds)
        with Rig(shape, None, lambda text: bar.update(task, description=text)) as rig:
            service = rig.service()
            began_s = time.monotonic()
            samples.append(take_sample(service))
            for strike in plan:
                outcomes.append(rig.run(strike))
                bar.update(task, completed=time.monotonic() - began_s)
                if not outcomes[-1].is_good:
                    bar.console.print(report.sentence_of(outcomes[-1]), markup=False)
                if service.has_ended:
                    break
                samples.append(take_sample(service))
                if time.monotonic() - began_s >= seconds:
                    break
            return samples, outcomes, rig.stop()


def tables_of(samples: list[Sample], outcomes: list[Outcome], found: list[Growth]) -> list[Table]:
    lines = [growth.cells() for growth in found]
    over_time = list(sums_over_time(samples, SAMPLES_SHOWN))
    lines_of_faults = report.lines_of(outcomes)
    places = [report.COLUMNS.index(name) for name in FAULT_COLUMNS]
    return [
        Table("Growth", COLUMNS, lines),
        Table("All processes over time", ("minute", *FLAT_AMOUNTS), over_time),
        Table("Faults", FAULT_COLUMNS, [[line[at] for at in places] for line in lines_of_faults]),
    ]


def main(
    minutes: Annotated[float, typer.Option(help="how long the load runs")] = 120.0,
    seed: Annotated[int, typer.Option(help="determines the faults")] = 1,
    shape: Annotated[str, typer.Option(help=f"the deployment: {', '.join(SHAPES)}")] = "replicas",
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("docs/operate/soak.md"),
) -> None:
    """Run a service under load and faults. Print which of its resources grow."""
    if shape not in SHAPES:
        raise ConfigError(f"there is no shape {shape!r}; there are: {', '.join(SHAPES)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = Console(width=160 if not os.isatty(1) else None)
    samples, outcomes, left = soak(SHAPES[shape], minutes * 60, seed, console)
    if len(samples) < 2:
        raise ConfigError("the service has ended before a second sample; see the faults above")
    found = list(growths(samples))
    lasted = (samples[-1].at_s - samples[0].at_s) / 60
    title = f"{shape}, seed {seed}, {lasted:.0f} minutes, {len(outcomes)} faults"
    tables = tables_of(samples, outcomes, found)
    for table in tables:
        console.print(table.for_terminal())
    growing = [f"{g.resource} ({g.unit})" for g in found if not g.is_flat]
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    verdict = (
        f"Growing: {', '.join(growing) or 'nothing'}. Left behind in the end: "
        f"{', '.join(left) or 'nothing'}. Faults with a lost or different answer, or with "
        f"something left behind: {len(bad)} of {len(outcomes)}."
    )
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[2]:.1f} in the last 15 minutes"
    lines = [INTRODUCTION, f"## {title}", "", *wrap(f"On {machine}. {verdict}", 118), ""]
    for table in tables:
        lines += [f"### {table.title}", "", *table.for_document(), ""]
    out.write_text("\n".join(lines).rstrip() + "\n")
    console.print(verdict, f"Saved in {out}.", soft_wrap=True)
    if growing or bad or left:
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
