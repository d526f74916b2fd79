"""A picture of a simulation: padding and eager steps over time, and by batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from dist_aclgraph.errors import ConfigError

PADDING, EAGER, STEPS = "tab:orange", "tab:blue", "0.6"


def plot_simulation(report: dict[str, Any], path: Path) -> None:
    """Draw the first simulated group, as an example of all groups.

    Raises:
        ConfigError: no step ran, or the file cannot be written.
    """
    group = report["groups"][0]
    if not group["steps"]:
        raise ConfigError("no step ran, so there is nothing to draw")
    figure = Figure(figsize=(9, 9), layout="constrained")
    over_time, by_size, steps = figure.subplots(3, 1, height_ratios=(2, 2, 1))
    steps.sharex(by_size)
    by_size.set_xscale("log", base=2)
    _over_time(over_time, group)
    _by_size(by_size, group)
    _steps(steps, group)
    figure.suptitle(
        f"{report['model']['name']}, {report['mode']}, group {group['group']}: "
        f"{group['padding_share']:.1%} padding, {group['eager_step_share']:.1%} of steps eager"
    )
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot write the plot {path}: {e}") from e


def _over_time(axes: Axes, group: dict[str, Any]) -> None:
    times = [found["from_s"] for found in group["over_time"]]
    for key, color, label in (
        ("padding_share", PADDING, "padding, of replayed tokens"),
        ("eager_step_share", EAGER, "eager, of steps"),
    ):
        shares = [found[key] for found in group["over_time"]]
        axes.step(times, shares, where="post", color=color, label=label, linewidth=1.3)
    for index, version in enumerate(group["plan_versions"][1:]):
        label = "" if index else "the plan changes"
        axes.axvline(version["at_s"], color="0.3", linestyle=":", linewidth=1, label=label)
    axes.set_xlabel("simulated seconds")
    _finish(axes, "Over time")


def _by_size(axes: Axes, group: dict[str, Any]) -> None:
    sizes = [found["tokens"] for found in group["by_tokens"]]
    for key, color, label in (
        ("padding_share", PADDING, "padding, of replayed tokens"),
        ("eager_step_share", EAGER, "eager, of steps"),
    ):
        shares = [found[key] for found in group["by_tokens"]]
        axes.plot(sizes, shares, ".", color=color, label=label, markersize=5)
    axes.xaxis.set_major_formatter("{x:g}")
    _finish(axes, "By live tokens of a batch")


def _steps(axes: Axes, group: dict[str, Any]) -> None:
    sizes = [found["tokens"] for found in group["by_tokens"]]
    axes.vlines(sizes, 0, [found["steps"] for found in group["by_tokens"]], color=STEPS)
    axes.set_title("How often", loc="left")
    axes.set_xlabel("live tokens of a batch")
    axes.set_ylabel("steps")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(loc="best", fontsize="small")
    axes.grid(alpha=0.3)
