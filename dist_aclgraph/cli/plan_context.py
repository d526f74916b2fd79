"""Compares the capacity of the KV cache with and without context parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from dist_aclgraph.errors import ConfigError
from dist_aclgraph.simulate.deployment import AssumedDeployment

COMPARED_TOKENS = 32768  # length in tokens of the requests that the plan counts


def layout_in_words(sizes: Mapping[str, int]) -> str:
    """Return the sizes of a layout as a text, without pcp and dcp if they are 1."""
    names = [n for n in ("tp", "pcp", "dcp", "dp", "ep") if n[1:] != "cp" or sizes[n] > 1]
    return ", ".join(f"{name} {sizes[name]}" for name in names)


def context_entry(deployment: AssumedDeployment, pool_bytes: int) -> dict[str, Any] | None:
    """Return two KV capacities of a data parallel rank: with this layout, and with dcp 1 and pcp 1.

    Returns None if this layout has dcp 1 and pcp 1.

    Args:
        pool_bytes: size of the graphs' memory pool; 0 if this size was not predicted.
    """
    parallel = deployment.config.parallel
    if parallel.dcp == parallel.pcp == 1:
        return None
    request_tokens = min(COMPARED_TOKENS, deployment.facts.context_len)

    def describe(which: AssumedDeployment, pool_bytes: int) -> dict[str, Any]:
        room = which.room(pool_bytes, request_tokens)
        return {**which.config.parallel.model_dump(), **asdict(room)}

    layouts = [describe(deployment, pool_bytes)]
    with suppress(ConfigError):  # with dcp 1 and pcp 1, NPUs may have too little memory
        layouts.append(describe(deployment.without_shared_context(), 0))
    return {"request_tokens": request_tokens, "layouts": layouts}


def print_context(context: dict[str, Any], console: Console) -> None:
    """Print a row for each layout."""
    console.print(
        "What each data parallel rank has room for, and would have on the same NPUs with dcp 1, "
        "pcp 1:"
    )
    requests = f"requests of {context['request_tokens']}"
    names = ("KV bytes/token", "tokens", "longest", requests, "in all")
    table = Table("layout", *(Column(name, justify="right") for name in names))
    for each in context["layouts"]:
        table.add_row(
            layout_in_words(each),
            f"{each['bytes_per_token']:.0f}",
            f"{each['tokens']}",
            f"{each['longest']}",
            f"{each['requests']}",
            f"{each['requests'] * each['dp']}",
        )
    console.print(table)
