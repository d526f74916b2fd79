"""The results of ``make bench-context`` as tables for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from benchmarks.tables import MIB, filled_table, markdown_table

KIB = 1 << 10
CACHES = (
    "dcp", "tokens", "KV of a rank, KiB", "KV / base", "blocks of a rank, KiB", "longest served",
    "longest / base",
)  # fmt: skip
DECODES = (
    "dcp", "context", "ms a step", "step / base", "ms, kernels skipped", "host, us", "host / base",
    "update, us a layer", "collectives", "KiB from others",
)  # fmt: skip
PROMPTS = (
    "pcp", "prompt", "first token, ms", "time / base", "work of a rank, M", "work / base",
    "collectives", "MiB from others",
)  # fmt: skip


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Return caches, decode steps and prompts."""
    for title, columns, lines in _parts(results):
        yield filled_table(f"{title}. {results['note']}", columns, lines)


def markdown(results: dict[str, Any]) -> str:
    """Return the same for a document."""
    lines = [
        f"{results['ranks']} ranks on {results['cores']} cores, {results['dtype']}, "
        f"{results['repeats']} rounds of {results['steps']} tokens a request, load of the machine "
        f"{results['load'][0]:.1f} before and {results['load'][1]:.1f} behind; {results['note']}.",
        "",
    ]
    for _, columns, found in _parts(results):
        lines += [*markdown_table(columns, found), ""]
    return "\n".join(lines)


def _parts(
    results: dict[str, Any],
) -> Iterator[tuple[str, tuple[str, ...], Iterator[tuple[str, ...]]]]:
    tp = f"TP {results['ranks']}"
    yield f"KV caches in shards, {tp}", CACHES, _caches(results["caches"])
    yield f"Decode steps of one request, {tp}", DECODES, _decodes(results["decodes"])
    yield f"Prompts over ranks, TP {results['prompt_tp']}", PROMPTS, _prompts(results["prompts"])


def _caches(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    base = rows[0]
    for row in rows:
        yield (
            str(row["dcp"]),
            str(row["tokens"]),
            f"{row['kv_bytes'] / KIB:.0f}",
            f"{row['kv_bytes'] / base['kv_bytes']:.3f}",
            f"{row['cache_bytes'] / KIB:.0f}",
            str(row["longest"]),
            f"{row['longest'] / base['longest']:.2f}",
        )


def _decodes(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        yield (
            str(row["dcp"]),
            str(row["context"]),
            f"{row['step_ms']:.1f}",
            f"{row['step_ratio']['median']:.2f}",
            f"{row['skipped_step_ms']:.1f}",
            f"{row['host_us']:.0f}",
            f"{row['host_ratio']['median']:.2f}",
            f"{row['stages_us'].get('update_per_layer', 0.0):.0f}",
            f"{row['collectives']:.0f}",
            f"{row['collective_bytes'] / KIB:.1f}",
        )


def _prompts(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        yield (
            str(row["pcp"]),
            str(row["prompt"]),
            f"{row['first_token_ms']:.0f}",
            f"{row['first_token_ratio']['median']:.2f}",
            f"{max(row['work']) / 1e6:.2f}",
            f"{row['work_ratio']:.3f}",
            f"{row['collectives']:.0f}",
            f"{row['collective_bytes'] / MIB:.2f}",
        )
