"""``make bench-moe``: experts that are divided among four ranks (TP 2, DP 2, EP 4). Each variant
differs from the base deployment in one setting.

The settings are: the graphs, the drafts, the exchange that sends tokens to experts, and whether
shared experts run at the same time as routed experts. Each variant is a deployment of the tiny
DeepSeek. All deployments run at the same time, and they are measured alternately with the same chat
requests. The ranks share this machine's cores, so the results are no measurements of an NPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.common.command import report_bench, run_command
from benchmarks.common.engine import DecodeEngine
from benchmarks.common.moe_workload import chat_workload, mixed_chat_workload
from benchmarks.common.report import Report, draw_bars, make_table, sheet
from benchmarks.common.turns import (
    MIXED,
    Turns,
    Workloads,
    ray_for,
    show_start,
    summary,
    take_turns,
    workload_rows,
)
from benchmarks.common.workload import (
    Run,
    ratios,
    step_ms,
)
from dist_aclgraph.config import ExchangeSetting, GraphMode
from dist_aclgraph.files.shipped import shipped
from dist_aclgraph.planning.buckets import asked_sizes
from dist_aclgraph.text.tokenizer import Tokenizer

MODEL = shipped("models/tiny-deepseek")
LAYOUT = {"tp": 2, "dp": 2, "ep": 4}
BATCHES = (1, 16)
MIXED_BATCH = 8
WARM_UP_STEPS = 12
MAX_LEN = 256
# Batch sizes of a data-parallel rank, in requests, for which decode graphs are captured.
ROWS = (1, 2, 4, 8)
# Sizes of the graphs for mixed batches. The largest size is large enough for all prompts of a
# data-parallel rank.
MIXED_SIZES = (8, 16, 32, 64, 128, 256, 512)

STEPS = {
    "variant": "{name}",
    "workload": "{workload}",
    "ms a step": "{step_ms_p50:.1f}",
    "step / base": "{step_ratio[median]:.2f}",
    "tokens/s": "{tokens_per_s:.0f}",
    "rate / base": "{rate_ratio[median]:.2f}",
    "tokens a step": "{tokens_per_step:.2f}",
    "accepted": "{accepted}",
    "load, max / mean": "{imbalance:.2f}",
    "reruns": "{reruns}",
    "tokens differ": "{differing_requests}/{requests}",
}
GRAPHS = {
    "variant": "{name}",
    "ready, s": "{start_s:.0f}",
    "graphs": "{graphs}",
    "capture, s": "{capture_s:.2f}",
    "streams": "{streams}",
    "pool, MiB": "{pool_bytes!M:.0f}",
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The settings in which a deployment differs from the base."""

    mode: GraphMode = "FULL_DECODE_ONLY"
    num_drafts: int = 1
    overlap: bool = False
    exchange: ExchangeSetting = "all_gather"


BASE = "base"
VARIANTS = {
    BASE: Variant(),
    "eager": Variant(mode="NONE"),
    "and pieces": Variant(mode="FULL_AND_PIECEWISE"),
    "no drafts": Variant(num_drafts=0),
    "two drafts": Variant(num_drafts=2),
    "overlap": Variant(overlap=True),
    "all_to_all": Variant(exchange="all_to_all"),
    "mc2": Variant(exchange="mc2"),
}
OTHERS = ",".join(name for name in VARIANTS if name != BASE)


def main(
    model: Annotated[Path, typer.Option(help="The checkpoint.")] = MODEL,
    steps: Annotated[int, typer.Option(help="Tokens per request.")] = 40,
    repeats: Annotated[int, typer.Option(help="Rounds: all variants by turns.")] = 5,
    variants: Annotated[str, typer.Option(help="Those beside the base.")] = OTHERS,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
) -> None:
    """Measure, print and save."""
    chosen = {name: VARIANTS[name] for name in (BASE, *variants.split(","))}
    report_bench(
        "moe",
        out,
        lambda _, bar: measure(bar, model, chosen, steps, repeats),
        report,
        draw,
    )


def measure(
    bar: Progress, model: Path, variants: Mapping[str, Variant], steps: int, repeats: int
) -> dict[str, Any]:
    """Deploy all variants, run all workloads alternately, and return the measurements."""
    tokenizer = Tokenizer(model)
    engines = {name: _make_engine(model, name, variant, bar) for name, variant in variants.items()}
    warm_up, workloads = (
        _workloads(tokenizer, count) for count in (min(steps, WARM_UP_STEPS), steps)
    )
    with ray_for(engines.values()):
        turns = take_turns(engines, warm_up, workloads, repeats, bar)
    return {
        **turns.circumstances,
        "layout": LAYOUT,
        "model": model.name,
        "steps": steps,
        "repeats": repeats,
        "base": BASE,
        "variants": {
            name: {
                **asdict(variant),
                **_capture(turns.reports[name]),
                "workloads": _summaries(turns, name),
            }
            for name, variant in variants.items()
        },
    }


def _make_engine(model: Path, name: str, variant: Variant, bar: Progress) -> DecodeEngine:
    queries = 1 + variant.num_drafts
    return DecodeEngine(
        model,
        max(BATCHES),
        on_progress=show_start(bar, name),
        parallel={**LAYOUT, "exchange": variant.exchange},
        graph={
            "mode": variant.mode,
            **asked_sizes(variant.mode, [rows * queries for rows in ROWS], MIXED_SIZES),
            "overlap_shared_experts": variant.overlap,
            "lazy": "off",
            "rebucket_s": 0.0,
        },
        speculative={"num_tokens": variant.num_drafts},
        scheduler={"max_num_batched_tokens": MIXED_SIZES[-1]},
        max_model_len=MAX_LEN,
        kv={"num_blocks": 4 * max(BATCHES)},
    )


def _workloads(tokenizer: Tokenizer, steps: int) -> Workloads:
    decode = {str(batch): chat_workload(tokenizer, batch, steps) for batch in BATCHES}
    return {**decode, MIXED: mixed_chat_workload(tokenizer, MIXED_BATCH, steps)}


def _capture(report: dict[str, Any]) -> dict[str, Any]:
    """Return the cost of a variant's graphs: the seconds of the slowest rank, and the resources of
    one rank.
    """
    buckets = report["buckets"]
    return {
        "start_s": report["ready_seconds"],
        "graphs": len(buckets),
        "capture_s": sum(bucket["capture_seconds"] for bucket in buckets),
        "streams": sum(bucket["streams"] for bucket in buckets),
        "pool_bytes": report["pool_bytes"],
    }


def _summaries(turns: Turns, name: str) -> dict[str, dict[str, Any]]:
    return {
        workload: _summary(runs, turns.runs[BASE][workload])
        for workload, runs in turns.runs[name].items()
    }


def _summary(runs: Sequence[Run], base: Sequence[Run]) -> dict[str, Any]:
    """Return the results of one variant with one workload. Counts are sums over all rounds."""
    num_drafted = sum(run.num_drafted for run in runs)
    accepted = [sum(counts) for counts in zip(*(run.accepted for run in runs), strict=True)]
    loads = [sum(counts) for counts in zip(*(run.expert_tokens for run in runs), strict=True)]
    return {
        **summary(runs, base),
        "step_ratio": ratios(step_ms(runs), step_ms(base)),
        "rate_ratio": ratios(
            [run.tokens_per_s for run in runs], [run.tokens_per_s for run in base]
        ),
        "tokens_per_step": sum(run.num_tokens for run in runs)
        / sum(run.num_deliveries for run in runs),
        "acceptance": [count / num_drafted for count in accepted],
        "expert_tokens": loads,
        "imbalance": max(loads) / statistics.mean(loads),
        "reruns": sum(run.num_reruns for run in runs),
    }


def report(results: dict[str, Any]) -> Report:
    rows = [
        {**row, "accepted": " ".join(f"{share:.0%}" for share in row["acceptance"]) or "-"}
        for row in workload_rows(results["variants"])
    ]
    graphs = [{"name": name, **found} for name, found in results["variants"].items()]
    what = f"{_layout()}, {results['repeats']} rounds of {results['steps']} tokens a request"
    return Report(
        what, [make_table("Steps", STEPS, rows), make_table("Graphs of one rank", GRAPHS, graphs)]
    )


def draw(results: dict[str, Any], path: Path) -> None:
    rows = [
        {**row, "shares": "\n".join(f"{100 * share:.0f}" for share in row["acceptance"])}
        for row in workload_rows(results["variants"])
    ]
    bars = partial(draw_bars, rows=rows, group="{title}", series="{name}", has_legend=False)
    what = "against the base's: median (bar), of each round (dots)"
    title = (
        f"{results['model']}, {_layout()}, {results['repeats']} rounds of {results['steps']} tokens"
    )
    with sheet(path, results, title) as (figure, (steps, speed, drafts, loads)):
        bars(
            steps, title=f"Time of a step {what}", height="step_ratio[median]",
            dots="step_ratio[rounds]", line=1.0,
        )  # fmt: skip
        bars(
            speed, title=f"Tokens/s {what}", height="rate_ratio[median]",
            dots="rate_ratio[rounds]", line=1.0,
        )  # fmt: skip
        bars(
            drafts, title="Tokens of a request and step; drafts accepted by position (%)",
            height="tokens_per_step", label="{shares}",
        )  # fmt: skip
        bars(
            loads, title="Load of the experts: the busiest rank's against the mean",
            height="imbalance", line=1.0,
        )  # fmt: skip
        entries = steps.get_legend_handles_labels()
        figure.legend(*entries, loc="outside lower center", ncols=len(entries[0]), fontsize="small")


def _layout() -> str:
    return ", ".join(f"{axis.upper()} {size}" for axis, size in LAYOUT.items())


if __name__ == "__main__":
    run_command(main)
