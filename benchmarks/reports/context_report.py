"""The results of ``make bench-context`` as tables and as one figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.report import Report, draw_bars, make_table, sheet

CACHES = {
    "dcp": "{dcp}",
    "tokens": "{tokens}",
    "KV of a rank, KiB": "{kv_bytes!K:.0f}",
    "KV / base": "{kv_ratio:.3f}",
    "blocks of a rank, KiB": "{cache_bytes!K:.0f}",
    "longest served": "{longest}",
    "longest / base": "{longest_ratio:.2f}",
}
DECODES = {
    "dcp": "{dcp}",
    "context": "{context}",
    "ms a step": "{step_ms:.1f}",
    "step / base": "{step_ratio[median]:.2f}",
    "ms, kernels skipped": "{skipped_step_ms:.1f}",
    "host, us": "{host_us:.0f}",
    "host / base": "{host_ratio[median]:.2f}",
    "update, us a layer": "{update_us:.0f}",
    "collectives": "{collectives:.0f}",
    "KiB from others": "{collective_bytes!K:.1f}",
}
PROMPTS = {
    "pcp": "{pcp}",
    "prompt": "{prompt}",
    "first token, ms": "{first_token_ms:.0f}",
    "time / base": "{first_token_ratio[median]:.2f}",
    "work of a rank, M": "{millions:.2f}",
    "work / base": "{work_ratio:.3f}",
    "collectives": "{collectives:.0f}",
    "MiB from others": "{collective_bytes!M:.2f}",
}


def report(results: dict[str, Any]) -> Report:
    tp = f"TP {results['ranks']}"
    decodes = [
        {**row, "update_us": row["stages_us"].get("update_per_layer", 0.0)}
        for row in results["decodes"]
    ]
    prompts = [{**row, "millions": max(row["work"]) / 1e6} for row in results["prompts"]]
    return Report(
        f"{results['ranks']} ranks, {results['dtype']}, {results['repeats']} rounds of "
        f"{results['steps']} tokens a request",
        [
            make_table(f"KV caches in shards, {tp}", CACHES, _against_the_first(results["caches"])),
            make_table(f"Decode steps of one request, {tp}", DECODES, decodes),
            make_table(f"Prompts over ranks, TP {results['prompt_tp']}", PROMPTS, prompts),
        ],
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the results for caches, decode steps, host times and prompts. All values are ratios to
    the first setting.
    """
    caches = [
        {"dcp": row["dcp"], "what": what, "ratio": row[key]}
        for row in _against_the_first(results["caches"])
        for what, key in (
            ("KV of a rank, same context", "kv_ratio"),
            ("longest context served", "longest_ratio"),
        )
    ]
    with sheet(path, results, f"Context over {results['ranks']} ranks") as (_, charts):
        draw_bars(
            charts[0], caches, "Caches, against the first", group="dcp {dcp}", series="{what}",
            height="ratio", label="{ratio:.3g}",
        )  # fmt: skip
        charts[0].set_yscale("log", base=2)
        for axes, title, key in (
            (charts[1], "Time of a decode step", "step_ratio"),
            (charts[2], "Its host time, kernels skipped", "host_ratio"),
        ):
            draw_bars(
                axes, results["decodes"], f"{title}, against the first", group="context {context}",
                series="dcp {dcp}", height=f"{key}[median]",
                dots=f"{key}[rounds]", line=1.0,
            )  # fmt: skip
        draw_bars(
            charts[3], results["prompts"],
            "Time to first token (-: work of a rank), against the first",
            group="prompt {prompt}", series="pcp {pcp}",
            height="first_token_ratio[median]",
            dots="first_token_ratio[rounds]",
            mark="work_ratio", line=1.0,
        )  # fmt: skip


def _against_the_first(caches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    base = caches[0]
    return [
        {
            **row,
            "kv_ratio": row["kv_bytes"] / base["kv_bytes"],
            "longest_ratio": row["longest"] / base["longest"],
        }
        for row in caches
    ]
