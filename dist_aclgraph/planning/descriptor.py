"""What names a captured graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

RunMode = Literal["NONE", "PIECEWISE", "FULL"]


class BatchDescriptor(msgspec.Struct, frozen=True, order=True):
    """What names a captured graph, and nothing more.

    Attributes:
        num_tokens: padded token count, the bucket.
        num_reqs: padded request count; a graph without attention has no use for it, and 0.
        query_len: uniform query length, 0 where lengths differ.
        mode: how the graph was captured.
    """

    num_tokens: int
    num_reqs: int
    query_len: int
    mode: RunMode

    def __str__(self) -> str:
        kind = "decode" if self.query_len else "mixed"
        return f"{self.mode.lower()} {kind} {self.num_tokens}"


Table = list[BatchDescriptor | None]  # by token count; index 0 is never asked for


def table_of(graphs: Iterable[BatchDescriptor]) -> Table:
    """Return the smallest graph that holds each number of tokens.

    Args:
        graphs: of one kind, ascending.
    """
    table: Table = [None]
    for graph in graphs:
        table += [graph] * (graph.num_tokens + 1 - len(table))
    return table
