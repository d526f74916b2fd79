"""Shows progress while groups start or drain: a bar in a terminal, otherwise one line per state."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bar

from dist_aclgraph.actors.controller.controller import BYTES
from dist_aclgraph.actors.controller.controller import Progress as Report
from dist_aclgraph.planning.memory import GIB

WORDS = {
    "BUILDING": "Building the emulated NPU, once for this machine",
    "STARTING_RAY": "Starting Ray",
    "JOINING_RAY": "Joining the Ray cluster",
    "STARTING_CONTROLLER": "Starting the controller",
    "PLACING": "Placing workers",
    "JOINING": "Opening devices, joining HCCL groups",
    "LOADING": "Loading weights",
    "NEGOTIATING": "Negotiating the graph plan",
    "CAPTURING": "Capturing graphs",
    "DRAINING": "Draining: requests that run end",
}


class StartProgress:
    """Shows the controller's reports. Use it as a context manager, and call it with each report."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._words = ""
        self._bar: Bar | None = None
        if console.is_terminal:
            self._bar = Bar(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[counted]}"),
                TextColumn("{task.fields[detail]}"),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task(
                "Checking the device", total=None, counted="", detail=""
            )

    def __enter__(self) -> StartProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stop_at_once(self) -> None:
        """Restore the terminal, and print that the start is interrupted. For signal handlers."""
        if self._bar is not None:
            self._bar.stop()
        self._console.print("Stopping ...")

    def __call__(self, report: Report) -> None:
        words = WORDS.get(report.state)
        if words is None:
            return
        if report.part:
            words = f"{words} ({report.part})"
        if self._bar is not None:
            if words != self._words:
                # Each state has a new bar, because a bar's total cannot be removed.
                self._bar.remove_task(self._task)
                self._task = self._bar.add_task(words, total=None, counted="", detail="")
            self._bar.update(
                self._task,
                description=words,
                completed=report.done,
                total=report.total or None,
                counted=_counted(report),
                detail="" if report.detail == BYTES else report.detail,
            )
        elif words != self._words:
            self._console.print(f"{words} ...")
        self._words = words


def _counted(report: Report) -> str:
    """Return the progress within a state as a text such as ``3/9``, or in GiB."""
    if not report.total:
        return ""
    if report.detail == BYTES:
        return f"{report.done / GIB:.2f}/{report.total / GIB:.2f} GiB"
    return f"{report.done}/{report.total}"
