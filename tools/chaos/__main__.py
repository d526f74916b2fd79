"""``make chaos``: inject a plan of faults into a service, and print the effect of each fault."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.common.command import run_command
from benchmarks.common.report import Table
from dist_aclgraph.errors import ConfigError
from tools.chaos.disk import small_disk
from tools.chaos.hosts import Hosts, hosts
from tools.chaos.outcome import Outcome
from tools.chaos.plan import FILE_FAULTS, FIRSTS, HOST_FAULTS, Kind, Strike, make_plan
from tools.chaos.report import COLUMNS, lines_of, sentence_of
from tools.chaos.rig import Rig
from tools.chaos.shapes import SHAPES, Shape
from tools.namespaces import why_no_nodes

SHARE = 0.05  # each fault is injected before this fraction of all deltas has arrived


def run_plan(
    shape: Shape,
    plan: list[Strike],
    room: Path | None,
    console: Console,
    hosts: Hosts | None = None,
) -> Iterator[Outcome]:
    """Inject the faults of a plan. After each fault, print a line, and yield the outcome of the
    fault.

    If the iterator is closed, all processes that it has started are ended.
    """
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as bar:
        task = bar.add_task("", total=len(plan))
        with Rig(shape, room, lambda text: bar.update(task, description=text), hosts) as rig:
            for strike in plan:
                outcome = rig.run(strike)
                bar.console.print(sentence_of(outcome), markup=False, highlight=False)
                bar.advance(task)
                yield outcome
            if left := rig.stop():
                bar.console.print(f"left behind in the end: {', '.join(left)}", markup=False)


def chosen_kinds(only: str, shape: Shape, nodes: int) -> tuple[Kind, ...]:
    """Return the faults whose names are in ``only``, a comma-separated list. If it is empty, return
    all faults.

    Args:
        nodes: number of hosts, not counting the head; 0 for a service on this machine only.

    Raises:
        ConfigError: a name is unknown, or the fault needs other hosts.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {kind.name.lower(): kind for kind in (*FIRSTS, *FILE_FAULTS, *HOST_FAULTS)}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no fault {unknown[0]!r}; there are: {', '.join(known)}")
    chosen = tuple(known[name] for name in names) or (
        *(kind for kind in FIRSTS if not (nodes and kind is Kind.FULL_DISK)),
        *(FILE_FAULTS if shape.has_files else ()),
        *(HOST_FAULTS if nodes else ()),
    )
    if nodes <= shape.num_hosts and Kind.KILL_SPARE in chosen:
        if names:
            raise ConfigError(
                f"kill_spare needs a host without a group: --nodes {shape.num_hosts + 1} or more"
            )
        chosen = tuple(kind for kind in chosen if kind is not Kind.KILL_SPARE)
    if not nodes and (wrong := [kind for kind in chosen if kind in HOST_FAULTS]):
        raise ConfigError(f"{wrong[0].name.lower()} needs several hosts: give --nodes 3")
    return chosen


@contextmanager
def several_hosts(count: int, shape: Shape) -> Iterator[Hosts | None]:
    """Yield ``count`` hosts. Within this context, this thread uses the head's network. Yield None
    if ``count`` is 0.

    Raises:
        ConfigError: these hosts are too few for the shape, or this machine cannot have such hosts.
    """
    if not count:
        yield None
        return
    if count < shape.num_hosts:
        raise ConfigError(f"--nodes {count} are too few: the shape needs {shape.num_hosts} nodes")
    if (reason := why_no_nodes()) is not None:
        raise ConfigError(f"--nodes needs root: {reason}")
    with hosts(count, shape.npus) as found, found.head.network():
        yield found


def main(
    seed: Annotated[int, typer.Option(help="what the plan follows from")] = 1,
    faults: Annotated[int, typer.Option(help="how many are tried")] = 12,
    shape: Annotated[str, typer.Option(help=f"the deployment: {', '.join(SHAPES)}")] = "replicas",
    only: Annotated[str, typer.Option(help="names of faults, with commas between them")] = "",
    nodes: Annotated[int, typer.Option(help="hosts besides the head; 0: this machine")] = 0,
) -> None:
    """Inject faults into a service, and print a table with the effect of each fault."""
    if shape not in SHAPES:
        raise ConfigError(f"there is no shape {shape!r}; there are: {', '.join(SHAPES)}")
    # sys.exit closes the iterators, which end all processes that they have started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = Console(width=200 if not os.isatty(1) else None)
    found = SHAPES[shape]
    kinds = chosen_kinds(only, found, nodes)
    began_s = time.monotonic()
    with ExitStack() as stack:
        room = None
        if not nodes:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))
            room = stack.enter_context(small_disk(Path(folder)))
        if room is None and Kind.FULL_DISK in kinds:
            console.print("No small disk can be mounted here: no fault fills one.")
            kinds = tuple(kind for kind in kinds if kind is not Kind.FULL_DISK)
        where = stack.enter_context(several_hosts(nodes, found))
        max_deltas = int(SHARE * found.num_streams * found.num_tokens)
        plan = make_plan(seed, faults, max_deltas=max_deltas, kinds=kinds)
        for strike in plan:
            console.print(str(strike), markup=False, highlight=False)
        outcomes: list[Outcome] = []
        try:
            for outcome in run_plan(found, plan, room, console, where):
                outcomes.append(outcome)
        finally:  # the results are printed, however the run ends
            minutes = (time.monotonic() - began_s) / 60
            what = f"{shape}, {nodes} hosts, seed {seed}" if nodes else f"{shape}, seed {seed}"
            print_table(what, outcomes, minutes, console)
    if not all(outcome.is_good for outcome in outcomes):
        raise SystemExit(1)


def print_table(what: str, outcomes: list[Outcome], minutes: float, console: Console) -> None:
    """Print the table for the terminal, then the same table in Markdown."""
    title = (
        f"{what}, {len(outcomes)} faults, {os.cpu_count()} cores, load {os.getloadavg()[2]:.1f}, "
        f"{minutes:.0f} min"
    )
    table = Table(title, COLUMNS, list(lines_of(outcomes)))
    console.print(table.for_terminal())
    for line in (title, "", *table.for_document()):
        print(line)


if __name__ == "__main__":
    run_command(main)
