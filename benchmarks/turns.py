"""Deployments side by side, measured by turns: a drift of the machine meets all of them."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.engine import DecodeEngine
from benchmarks.workload import Arrival, Run, run_workload
from dist_aclgraph.actors.controller import Progress as StartProgress
from dist_aclgraph.actors.controller_life import OnProgress
from dist_aclgraph.actors.local_ray import start_ray
from dist_aclgraph.config import make_config
from dist_aclgraph.extras import require

MIXED = "mixed"  # a workload

Workloads = Mapping[str, Sequence[Arrival]]


@dataclass(frozen=True)
class Turns:
    """What all turns brought.

    Attributes:
        runs: of each deployment and workload, one a round.
        reports: of the deployments, after the last round.
        load: of the machine, before the first start and after the last round.
        seconds: since the first start.
    """

    runs: dict[str, dict[str, list[Run]]]
    reports: dict[str, dict[str, Any]]
    load: tuple[float, float]
    seconds: float

    @property
    def circumstances(self) -> dict[str, Any]:
        """What ran it, in its own words, and what that means for the figures."""
        report = next(iter(self.reports.values()))
        warning = "emulated NPU on the CPU; not an NPU figure; " if report["emulated"] else ""
        return {
            "note": f"{warning}ran on: {report['device']}",
            "device": report["device"],
            "emulated": report["emulated"],
            "cores": os.cpu_count(),
            "load": list(self.load),
            "seconds": self.seconds,
        }


def take_turns(
    engines: Mapping[str, DecodeEngine],
    warm_up: Workloads,
    workloads: Workloads,
    repeats: int,
    bar: Progress,
) -> Turns:
    """Deploy all, run all workloads by turns, once to warm up and ``repeats`` times; stop all.

    Ray must run, see ``ray_for``.
    """
    started_s = time.monotonic()
    load_before = os.getloadavg()[0]
    runs: dict[str, dict[str, list[Run]]] = {name: {w: [] for w in workloads} for name in engines}
    with ExitStack() as stack:
        for engine in engines.values():
            stack.enter_context(engine)
        turns = [
            (round_, workload, name)
            for round_ in range(repeats + 1)
            for workload in workloads
            for name in engines
        ]
        task = bar.add_task("", total=len(turns))
        for round_, workload, name in turns:
            warm = round_ == 0
            what = "Warming up" if warm else f"Round {round_} of {repeats}"
            bar.update(task, description=f"{what}: {name}, {title(workload)}")
            arrivals = (warm_up if warm else workloads)[workload]
            run = run_workload(engines[name].client, f"{workload}-{round_}", arrivals)
            if not warm:
                runs[name][workload].append(run)
            bar.advance(task)
        reports = {name: engine.deployment.report() for name, engine in engines.items()}
        load = (load_before, os.getloadavg()[0])
    return Turns(runs, reports, load, time.monotonic() - started_s)


@contextmanager
def ray_for(engines: Collection[DecodeEngine]) -> Iterator[None]:
    """Start a Ray with NPUs for each deployment, and stop it at the end.

    On one machine, they are all the same cores.
    """
    num_npus = sum(engine.config.parallel.world_size for engine in engines)
    model = next(iter(engines)).config.model
    start_ray(make_config({"model": model, "parallel": {"dp": num_npus}}))
    try:
        yield
    finally:
        ray.shutdown()


def show_start(bar: Progress, name: str) -> OnProgress:
    """Return what shows how far the start of a deployment is."""
    task = bar.add_task(f"{name}: waits", total=None)

    def show(progress: StartProgress) -> None:
        words = f"{name}: {progress.state.lower()} {progress.detail}"
        bar.update(task, description=words, completed=progress.done, total=progress.total or None)

    return show


def title(workload: str) -> str:
    """Return a workload in words; one that is a number is named by the size of its batch."""
    return f"batch {workload}" if workload.isdecimal() else workload


def differing_requests(runs: Iterable[Run], base: Run) -> int:
    """Return how many requests brought other tokens than in a run of the base.

    One run, so that the base can differ from itself.
    """
    return sum(
        ours != theirs for run in runs for ours, theirs in zip(run.tokens, base.tokens, strict=True)
    )


def report_bench(
    name: str,
    out: Path,
    measure: Callable[[Path, Progress], dict[str, Any]],
    tables: Callable[[dict[str, Any]], Iterable[Table]],
    markdown: Callable[[dict[str, Any]], str],
    draw: Callable[[dict[str, Any], Path], None],
) -> None:
    """Measure with a bar, save as JSON, markdown and figure, and print.

    Args:
        measure: is given a folder of its own, which is gone afterwards.
    """
    require("matplotlib", "bench", "the figure of this bench")
    console = Console(width=150)
    torch.set_num_threads(1)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar,
    ):
        results = measure(Path(folder), bar)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(results, indent=2))
    (out / f"{name}.md").write_text(markdown(results))
    draw(results, out / f"{name}.png")
    for table in tables(results):
        console.print(table)
    console.print(f"{results['note']}. Saved in {out}/{name}.json, .md and .png.")
