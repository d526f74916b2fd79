"""The key of a captured graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

RunMode = Literal["NONE", "PIECEWISE", "FULL"]


class BatchDescriptor(msgspec.Struct, frozen=True, order=True):
    """The key of a captured graph. There are never two graphs with the same key.

    Attributes:
        num_tokens: padded number of tokens, also called the bucket.
        num_reqs: padded number of requests; 0 for a graph without attention, because such a graph
            accepts any number of requests.
        query_len: number of tokens of each request; 0 if requests may have different numbers of
            tokens.
    """

    num_tokens: int
    num_reqs: int
    query_len: int
    mode: RunMode

    def __str__(self) -> str:
        kind = "decode" if self.query_len else "mixed"
        return f"{self.mode.lower()} {kind} {self.num_tokens}"


Table = list[BatchDescriptor | None]  # the index is the number of tokens; index 0 is never used


def table_of(graphs: Iterable[BatchDescriptor]) -> Table:
    """Return, for each number of tokens, the smallest graph with at least this number of tokens.

    Args:
        graphs: graphs of one kind, in ascending order of their sizes.
    """
    table: Table = [None]
    for graph in graphs:
        table += [graph] * (graph.num_tokens + 1 - len(table))
    return table
