"""The command line of a bench: its options, its progress bar, and its output files."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.common.report import Report
from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.extras import require

Results = dict[str, Any]


def numbers(text: str) -> tuple[int, ...]:
    """Return the integers in the text of an option, e.g. ``1,2,4``."""
    return tuple(map(int, text.split(",")))


def run_command(main: Callable[..., None]) -> None:
    """Run ``main`` with the options of the command line. If it raises a DistAclGraphError, print
    the message and exit with code 1.
    """
    try:
        typer.run(main)
    except DistAclGraphError as e:
        raise SystemExit(f"error: {e}") from None


def report_bench(
    name: str,
    out: Path,
    measure: Callable[[Path, Progress], Results],
    report: Callable[[Results], Report],
    draw: Callable[[Results, Path], None] | None = None,
) -> None:
    """Measure, print tables of the results, and save the results as JSON, as markdown and as a
    figure.

    Args:
        measure: a function that returns the results. Its arguments are a temporary folder and a
            progress bar.
        report: a function that returns the tables of the results.
        draw: a function that draws the figure; None if the bench has no figure.
    """
    if draw is not None:
        require("matplotlib", "bench", "the figure of this bench")
    console = Console(width=150)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    started_s, load = time.monotonic(), os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar,
    ):
        found = measure(Path(folder), bar)
    results = {
        "cores": os.cpu_count(),
        "load": [load, os.getloadavg()[0]],
        "seconds": time.monotonic() - started_s,
        **found,
    }
    told = report(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(results, indent=2))
    (out / f"{name}.md").write_text(told.for_document(results))
    for table in told.tables:
        console.print(table.for_terminal())
    if draw is not None:
        draw(results, out / f"{name}.png")
    files = ".json, .md and .png" if draw else ".json and .md"
    console.print(f"{told.heading(results)} Saved in {out}/{name}{files}.", soft_wrap=True)
