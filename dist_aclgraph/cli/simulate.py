"""``dist-aclgraph simulate`` shows a simulation's progress, and prints its report as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from dist_aclgraph.cli.plan_context import layout_in_words
from dist_aclgraph.config import Config
from dist_aclgraph.simulate.copy_rates import CopyRates
from dist_aclgraph.simulate.load_options import LoadOptions
from dist_aclgraph.simulate.simulation import simulate
from dist_aclgraph.simulate.times import StepTimes

SHOWN_VERSIONS = 8
MUCH_EAGER = 0.1  # if a larger fraction of tokens runs eagerly, the report suggests --compare


def simulate_with_progress(
    config: Config,
    options: LoadOptions,
    times: StepTimes,
    rates: CopyRates,
    with_comparison: bool,
) -> dict[str, Any]:
    """Simulate; show the progress on stderr if stderr is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("Simulating"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=1.0)
        return simulate(
            config,
            options,
            times,
            rates=rates,
            with_comparison=with_comparison,
            on_progress=lambda share: bar.update(task, completed=share),
        )


def render_simulation(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables."""
    model, speed = report["model"], report["speed"]
    console.print(
        f"[bold]{model['name']}[/bold]: {report['num_ranks']} NPUs ({layout_in_words(model)}) in "
        f"{report['num_groups']} lockstep groups; {report['mode']}, priced by "
        f"{report['budget_model']}"
    )
    console.print(f"Load: {report['load']}", markup=False)
    for sentence in report["assumptions"]:
        console.print(f"  assumed: {sentence}", markup=False)
    for group in report["groups"]:
        _render_group(group, console)
    if len(report["groups"]) > 1:
        console.print(f"All groups: {_shares_in_words(report['overall'])}")
    if report["routing"] is not None:
        console.print("The same requests with shared beginnings, sent to groups by each rule:")
        console.print(_routing(report["routing"]))
    if report["copies"] is not None:
        console.print("The same requests with copies of KV in files, and without:")
        console.print(_copies(report["copies"]))
    if report["compare"] is not None:
        console.print("The same batches with other graphs:")
        console.print(_comparison(report["compare"]))
    elif (share := report["overall"]["eager_token_share"]) > MUCH_EAGER:
        console.print(f"{share:.1%} of tokens run eagerly: --compare shows them with other graphs")
    console.print(
        f"{speed['steps']:,} steps in {speed['seconds']:.2f} s of this machine: "
        f"{speed['steps_per_s']:,.0f} steps/s, after {speed['plan_seconds']:.2f} s of planning",
        highlight=False,
    )


def _render_group(group: dict[str, Any], console: Console) -> None:
    requests, lazy, streams = group["requests"], group["lazy"], group["streams"]
    console.print(
        f"Group {group['group']}: {group['steps']:,} steps in {group['seconds']:,.1f} simulated "
        f"seconds; {_shares_in_words(group)}",
        highlight=False,
    )
    eager = "; ".join(f"{reason} {count:,}" for reason, count in group["eager_steps"].items())
    console.print(f"  eager steps by reason: {eager or 'none'}", highlight=False)
    refused = "".join(f"; {count:,} refused ({n})" for n, count in requests["refused"].items())
    console.print(
        f"  {requests['finished']:,} requests finished{refused}; "
        f"{requests['generated_tokens']:,} tokens generated; {group['preemptions']:,} preemptions; "
        f"at most {requests['most_waiting']:,} waited",
        highlight=False,
    )
    if requests["generated_tokens"]:
        console.print(f"  {_latency_in_words(group)}", highlight=False)
    held = "; ".join(f"{n} {c}" for n, c in streams["at_most"].items() if c and n != "all")
    console.print(
        f"  streams by the budget model, at most: {streams['at_most']['all']} of "
        f"{streams['usable'] + streams['kept_for_lazy_graphs']} on rank {streams['rank']} "
        f"({held or 'none'}; {streams['kept_for_lazy_graphs']} are kept for lazy graphs)",
        highlight=False,
    )
    console.print(
        f"  lazy graphs: {lazy['captures']} captures, {lazy['evictions']} evictions, room for "
        f"{lazy['capacity']}; the plan changed {group['plan_changes']} times by "
        f"{group['plan_captures']} captures",
        highlight=False,
    )
    for version in group["plan_versions"][-SHOWN_VERSIONS:]:
        buckets = "; ".join(
            f"{name} {', '.join(map(str, sizes))}" for name, sizes in version["families"].items()
        )
        console.print(
            f"  from {version['at_s']:,.1f} s plan {version['version']}: {buckets or 'no graph'}",
            highlight=False,
        )
    if group["replays"]:
        console.print(_replays(group))


def _latency_in_words(group: dict[str, Any]) -> str:
    latency, drafts = group["latency"], group["drafts"]
    first, each = latency["first_token_s"], latency["per_token_s"]
    words = (
        f"first token after {first['p50']:.3f} s (p50), {first['p99']:.3f} s (p99); each further "
        f"token {each['p50'] * 1e3:.2f} ms (p50), {each['p99'] * 1e3:.2f} ms (p99); "
        f"{latency['tokens_per_s']:,.0f} tokens/s"
    )
    if drafts["verifications"]:
        words += f"; {drafts['tokens_per_verification']:.2f} tokens a step of a request, by drafts"
    return words


def _replays(group: dict[str, Any]) -> Table:
    table = Table("graph", "replays", "padding")
    for name, count in group["replays"].items():
        table.add_row(name, f"{count:,}", f"{group['wasted_by_graph'][name]:.1%}")
    return table


def _routing(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "requests go", "prompt tokens cached", "first token p50", "p99", "requests of groups"
    )
    for row in rows:
        first = row["first_token_s"]
        counts = [group["requests"] for group in row["groups"]]
        table.add_row(
            row["name"],
            f"{row['cached_share']:.1%}",
            f"{first['p50']:.3f} s",
            f"{first['p99']:.3f} s",
            f"{min(counts):,} to {max(counts):,}",
        )
    return table


def _copies(rows: list[dict[str, Any]]) -> Table:
    """Return a table. For each tier of KV copies (host memory, disk), a column has the fraction of
    prompt tokens whose KV was read from this tier. A token whose KV was fetched from another node
    counts in two columns: the column of the tier, and the column of fetched tokens.
    """
    tiers = sorted({tier for row in rows for tier in row["loaded_share"]}, reverse=True)
    fetched = ["fetched from other nodes"] if any(row["fetched_share"] for row in rows) else []
    table = Table(
        "",
        "prompt tokens cached",
        *(f"from {tier}" for tier in tiers),
        *fetched,
        "first token p50",
        "p99",
    )
    for row in rows:
        first, loaded = row["first_token_s"], row["loaded_share"]
        table.add_row(
            row["name"],
            f"{row['cached_share']:.1%}",
            *(f"{loaded.get(tier, 0.0):.1%}" for tier in tiers),
            *(f"{row['fetched_share']:.1%}" for _ in fetched),
            f"{first['p50']:.3f} s",
            f"{first['p99']:.3f} s",
        )
    return table


def _comparison(rows: list[dict[str, Any]]) -> Table:
    table = Table("graphs", "buckets", "streams", "padding", "eager steps", "of tokens")
    table.columns[0].no_wrap = True
    for row in rows:
        lacks = "" if row["is_affordable"] else f", too many for {row['usable']}"
        table.add_row(
            row["name"],
            str(row["buckets"]),
            f"{row['streams']}{lacks}",
            f"{row['padding_share']:.1%}",
            f"{row['eager_step_share']:.1%}",
            f"{row['eager_token_share']:.1%}",
        )
    return table


def _shares_in_words(shares: dict[str, Any]) -> str:
    return (
        f"{shares['padding_share']:.1%} of replayed tokens are padding, "
        f"{shares['eager_step_share']:.1%} of steps ({shares['eager_token_share']:.1%} of tokens) "
        "run eagerly"
    )
