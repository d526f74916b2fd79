"""Parts of figures that benches of several deployments share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from dist_aclgraph.bench.turns import title

GROUP_WIDTH = 0.8  # of the room between two ticks


class Bars(NamedTuple):
    """One deployment's bars: a place for each workload, and its figures."""

    name: str
    places: list[float]
    rows: list[dict[str, Any]]
    width: float


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
