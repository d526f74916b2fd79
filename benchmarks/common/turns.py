"""Deployments that run at the same time and are measured alternately. So a drift of the machine's
speed affects all deployments equally.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from rich.progress import Progress

from benchmarks.common.engine import DecodeEngine
from benchmarks.common.workload import (
    Arrival,
    Run,
    mean_stages,
    padded_fraction,
    percentile,
    run_workload,
)
from dist_aclgraph.actors.cluster.local_ray import start_ray
from dist_aclgraph.actors.controller.controller import Progress as StartProgress
from dist_aclgraph.actors.deployment.controller_life import OnProgress
from dist_aclgraph.config import make_config

MIXED = "mixed"  # name of the workload during which further requests arrive

Workloads = Mapping[str, Sequence[Arrival]]


@dataclass(frozen=True)
class Turns:
    """The results of all turns.

    Attributes:
        runs: the runs of each deployment with each workload, one run per round.
        reports: the report of each deployment after the last round.
    """

    runs: dict[str, dict[str, list[Run]]]
    reports: dict[str, dict[str, Any]]

    @property
    def circumstances(self) -> dict[str, Any]:
        """Return the device of the measurements, and whether this device is emulated."""
        report = next(iter(self.reports.values()))
        warning = "emulated NPU on the CPU; not an NPU figure; " if report["emulated"] else ""
        return {
            "note": f"{warning}ran on: {report['device']}",
            "device": report["device"],
            "emulated": report["emulated"],
        }


def take_turns(
    engines: Mapping[str, DecodeEngine],
    warm_up: Workloads,
    workloads: Workloads,
    repeats: int,
    bar: Progress,
) -> Turns:
    """Start all deployments. Run all workloads alternately: one round to warm up, and then
    ``repeats`` rounds. Stop all deployments.

    Ray must run, see ``ray_for``.
    """
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
    return Turns(runs, reports)


@contextmanager
def ray_for(engines: Collection[DecodeEngine]) -> Iterator[None]:
    """Start Ray with enough NPUs for all deployments, and stop Ray at the end.

    The NPUs are emulated on one machine, so all of them share the same cores.
    """
    num_npus = sum(engine.config.parallel.world_size for engine in engines)
    model = next(iter(engines)).config.model
    start_ray(make_config({"model": model, "parallel": {"dp": num_npus}}))
    try:
        yield
    finally:
        ray.shutdown()


def show_start(bar: Progress, name: str) -> OnProgress:
    """Return the function that shows the progress of a deployment's start."""
    task = bar.add_task(f"{name}: waits", total=None)

    def show(progress: StartProgress) -> None:
        words = f"{name}: {progress.state.lower()} {progress.detail}"
        bar.update(task, description=words, completed=progress.done, total=progress.total or None)

    return show


def title(workload: str) -> str:
    """Return the title of a workload. If the workload is a number, it is the batch size."""
    return f"batch {workload}" if workload.isdecimal() else workload


def differing_requests(runs: Iterable[Run], base: Run) -> int:
    """Return how many requests of ``runs`` have tokens that differ from the same requests in
    ``base``.

    Tokens can differ even between two runs with the same settings.
    """
    return sum(
        ours != theirs for run in runs for ours, theirs in zip(run.tokens, base.tokens, strict=True)
    )


def summary(runs: Sequence[Run], base: Sequence[Run]) -> dict[str, Any]:
    """Return the results of one deployment with one workload. All rounds are counted together."""
    counts = (Counter(mean_stages(run.timings_us)[1]) for run in runs)
    return {
        "step_ms_p50": percentile([gap for run in runs for gap in run.gaps_ms], 50),
        "tokens_per_s": statistics.median(run.tokens_per_s for run in runs),
        "steps": dict(sum(counts, Counter())),
        "padded_fraction": padded_fraction(
            sum(run.padded_tokens for run in runs), sum(run.live_tokens for run in runs)
        ),
        "differing_requests": differing_requests(runs, base[0]),
        "requests": sum(len(run.tokens) for run in runs),
    }


def workload_rows(deployments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each deployment and each workload. The row contains the names of deployment
    and workload, and the results.
    """
    for name, found in deployments.items():
        for workload, row in found["workloads"].items():
            yield {"name": name, "workload": workload, "title": title(workload), **row}
