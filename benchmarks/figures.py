"""Parts of figures that benches of several deployments share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.turns import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GROUP_WIDTH = 0.8  # of the room between two ticks


class Bars(NamedTuple):
    """One deployment's bars: a place for each workload, and its figures."""

    name: str
    places: list[float]
    rows: list[dict[str, Any]]
    width: float


@contextmanager
def sheet(
    path: Path, results: Mapping[str, Any], title: str
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Return a figure and its four charts, row by row; save it at the end.

    The title goes on with what both benches did, and with the note on what ran them.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    yield figure, list(figure.subplots(2, 2).flat)
    figure.suptitle(
        f"{title}, {results['repeats']} rounds of {results['steps']} tokens on "
        f"{results['cores']} CPU cores\n{results['note']}"
    )
    figure.savefig(path, dpi=110)


def groups(axes: Axes, deployments: Mapping[str, Any]) -> list[Bars]:
    """Label the workloads; return the bars of each deployment."""
    names = list(next(iter(deployments.values()))["workloads"])
    axes.set_xticks(range(len(names)), [title(name) for name in names])
    width = GROUP_WIDTH / len(deployments)
    return [
        Bars(
            name,
            [i + (index - (len(deployments) - 1) / 2) * width for i in range(len(names))],
            list(found["workloads"].values()),
            width,
        )
        for index, (name, found) in enumerate(deployments.items())
    ]
