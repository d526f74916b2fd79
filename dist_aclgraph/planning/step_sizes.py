"""Sizes of the arrays that a rank keeps for its steps, shared by their allocation and the account
of memory.
"""

from __future__ import annotations

SPARE_POSITIONS = 16  # rotary positions of discarded drafts beyond the longest context


def table_width(num_tokens: int, block_size: int, num_drafts: int) -> int:
    """Return the width of the block table: blocks for the tokens and for the positions of drafts.

    A step verifies k drafts behind the last token, and drafting then adds k positions. It may begin
    up to k positions later than the host knows.
    """
    return -(-(num_tokens + 3 * num_drafts) // block_size)


def input_sizes(num_tokens: int, num_reqs: int, num_drafts: int) -> list[int]:
    """Return the sizes of a graph's arrays of integers, in their order, without the block table.

    First come tokens, positions and slots, then the last tokens. If drafts are verified, the last
    tokens are replaced, per request, by the row, the limit of drafts, the row behind and the slots
    of 3 k positions (see ``table_width``).

    Args:
        num_drafts: k, of each request; 0 if the graph verifies none.
    """
    by_request = [num_reqs] * 3 + [num_reqs * 3 * num_drafts] if num_drafts else [num_reqs]
    return [num_tokens] * 3 + by_request
