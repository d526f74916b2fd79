"""A picture of a plan: the fraction of padding for each batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.buckets import pad_to_bucket


def plot_padding(report: dict[str, Any], path: Path) -> None:
    """Draw padding over batch size for the sets of buckets in a plan report.

    Each family of graphs has its own panel.

    Raises:
        ConfigError: nothing is captured, or the file cannot be written.
    """
    families = report["plans"][0]["families"]
    if not families:
        raise ConfigError("no graph is captured, so there is no padding to draw")
    figure = Figure(figsize=(9, 3.6 * len(families)), layout="constrained")
    for axes, family in zip(
        figure.subplots(len(families), squeeze=False)[:, 0], families, strict=True
    ):
        _draw(axes, family)
    figure.suptitle(f"{report['model']['name']}: tokens that replay adds to a batch")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot write the plot {path}: {e}") from e


def _draw(axes: Axes, family: dict[str, Any]) -> None:
    highest = 0
    for (name, found), style in zip(family["sets"].items(), ("-", "-", "--"), strict=True):
        buckets = found["buckets"]
        sizes = range(1, buckets[-1] + 1)
        padding = [(pad_to_bucket(n, buckets) or n) - n for n in sizes]
        highest = max(highest, *padding)
        label = f"{name}: {len(buckets)} buckets, {found['padding_share']:.1%} of replayed tokens"
        axes.plot(sizes, padding, style, label=label, drawstyle="steps-mid", linewidth=1.3)
    axes.set_title(family["name"], loc="left")
    axes.set_xlabel("live tokens of a batch")
    axes.set_ylabel("padding tokens")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.4 * highest + 1)  # leaves space for the legend
    axes.legend(loc="upper left", fontsize="small")
    axes.grid(alpha=0.3)
