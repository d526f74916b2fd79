"""``make bench-start``: compares the start of one group with the start of several groups, in the
same run.

Kernels do nothing, so ranks have little work. Several groups start at the same time. If each
process had its own core, several groups would start as fast as one group. But all processes share
this machine's cores, and the import of libraries keeps a core busy. The bench shows the difference
for each phase.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import ray
import typer
from rich.console import Console

from benchmarks.common.command import run_command
from benchmarks.common.report import Table
from dist_aclgraph.actors.cluster.local_ray import start_ray
from dist_aclgraph.actors.controller.controller import Progress
from dist_aclgraph.actors.deployment import controller_life, deployment
from dist_aclgraph.config import Config, load_config

PHASES = ("PLACING", "JOINING", "LOADING", "NEGOTIATING", "CAPTURING")
CONFIG = "configs/tiny-qwen3.yaml"


@dataclass
class Phases:
    """The duration of each phase, in seconds. The accuracy is limited by the interval between two
    polls of the progress.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    _state: str = PHASES[0]
    _since_s: float = field(default_factory=time.monotonic)

    def show(self, progress: Progress) -> None:
        if progress.state != self._state:
            self.end(progress.state)

    def end(self, state: str = "") -> None:
        now_s = time.monotonic()
        self.seconds[self._state] = self.seconds.get(self._state, 0.0) + now_s - self._since_s
        self._state, self._since_s = state, now_s


def start_once(config: Config) -> dict[str, float]:
    phases = Phases()
    running = deployment.start(config, phases.show)
    phases.end()
    running.shut_down()
    return phases.seconds


def main(
    groups: Annotated[int, typer.Option(min=2, max=8, help="groups that start side by side")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="starts of each, by turns")] = 3,
    config: Annotated[Path, typer.Option(help="one group of it is compared")] = Path(CONFIG),
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Compare the start of one group with the start of several groups."""
    overrides = {"device.emulator.kernels": "skip", "parallel.dp": groups}
    several = load_config(config, overrides)
    one = load_config(config, overrides | {"parallel.dp": 1})
    local = start_ray(several)
    found: dict[int, list[dict[str, float]]] = {1: [], groups: []}
    try:
        start_once(one)  # not measured: the first start also reads files and builds the emulator
        for _ in range(turns):
            found[1].append(start_once(one))
            found[groups].append(start_once(several))
    finally:
        if local is not None:
            local.stop()
        else:
            ray.shutdown()
    rows = {phase: _medians(found, phase) for phase in (*PHASES, "in all")}
    if as_json:
        print(json.dumps({"cores": os.cpu_count(), "seconds": rows}))
        return
    lines = [
        (phase, f"{alone:.2f}", f"{both:.2f}", f"{both / alone:.2f}" if alone else "-")
        for phase, (alone, both) in rows.items()
    ]
    columns = ("phase", "1 group, s", f"{groups} groups, s", "ratio")
    console = Console()
    console.print(Table("Starts", columns, lines).for_terminal())
    console.print(f"Medians of {turns} starts on {os.cpu_count()} cores; progress is asked for "
                  f"every {controller_life.POLL_S:g} s.")  # fmt: skip


def _medians(found: dict[int, list[dict[str, float]]], phase: str) -> tuple[float, float]:
    alone, together = (
        statistics.median(
            sum(run.values()) if phase == "in all" else run.get(phase, 0.0) for run in runs
        )
        for runs in found.values()
    )
    return alone, together


if __name__ == "__main__":
    run_command(main)
