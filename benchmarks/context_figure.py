"""The results of ``make bench-context`` as one figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import GROUP_WIDTH, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = list[dict[str, Any]]


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw caches, decode steps, their host time, and prompts into one file."""
    title = f"Context over {results['ranks']} ranks"
    with sheet(path, results, title) as (_, (caches, steps, host, prompts)):
        _draw_caches(caches, results["caches"])
        decodes = results["decodes"]
        _draw_ratios(steps, decodes, ("dcp", "context"), "step_ratio", "Time of a decode step")
        _draw_ratios(
            host, decodes, ("dcp", "context"), "host_ratio", "Its host time, kernels skipped"
        )
        _draw_ratios(
            prompts, results["prompts"], ("pcp", "prompt"), "first_token_ratio",
            "Time to first token (-: work of a rank)",
        )  # fmt: skip


def _draw_caches(axes: Axes, rows: Rows) -> None:
    base = rows[0]
    names = [f"dcp {row['dcp']}" for row in rows]
    places = range(len(rows))
    width = GROUP_WIDTH / 2
    for index, (label, key) in enumerate(
        (("KV of a rank, same context", "kv_bytes"), ("longest context served", "longest"))
    ):
        values = [row[key] / base[key] for row in rows]
        at = [place + (index - 0.5) * width for place in places]
        axes.bar_label(axes.bar(at, values, width, label=label), fmt="%.3g", fontsize="small")
    axes.set_yscale("log", base=2)
    axes.margins(y=0.15)
    axes.set_xticks(places, names)
    axes.set_title("Caches, against the first", loc="left")
    axes.legend(fontsize="small")


def _draw_ratios(axes: Axes, rows: Rows, keys: tuple[str, str], ratio: str, title: str) -> None:
    """Draw a bar for each number of ranks in a group for each length; dots are rounds."""
    ranks, length = keys
    lengths = list(dict.fromkeys(row[length] for row in rows))
    numbers = list(dict.fromkeys(row[ranks] for row in rows))
    width = GROUP_WIDTH / len(numbers)
    for index, number in enumerate(numbers):
        found = [row for row in rows if row[ranks] == number]
        places = [i + (index - (len(numbers) - 1) / 2) * width for i in range(len(lengths))]
        medians = [row[ratio]["median"] for row in found]
        axes.bar(places, medians, width, label=f"{ranks} {number}")
        for place, row in zip(places, found, strict=True):
            rounds = row[ratio]["rounds"]
            axes.plot([place] * len(rounds), rounds, "k.", markersize=3)
            if "work_ratio" in row:
                axes.plot([place], [row["work_ratio"]], "r_", markersize=14)
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set_xticks(range(len(lengths)), [f"{length} {n}" for n in lengths])
    axes.set_title(f"{title}, against the first", loc="left")
    axes.legend(fontsize="small")
    axes.grid(axis="y", alpha=0.3)
