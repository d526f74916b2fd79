"""Sizes of the arrays that a rank keeps for its steps, used to allocate the arrays and to predict
their memory.
"""

from __future__ import annotations

# Number of rotary positions after the longest context, for drafts that are discarded.
SPARE_POSITIONS = 16


def table_width(num_tokens: int, block_size: int, num_drafts: int) -> int:
    """Return the width of the block table: blocks for the tokens and for 3 k positions of drafts.

    A step verifies k drafts after the last token, and drafting adds another k positions. If the
    host has not read the number of accepted drafts yet, the step can begin up to k positions after
    the position that the host assumes.
    """
    return -(-(num_tokens + 3 * num_drafts) // block_size)


def input_sizes(
    num_tokens: int,
    num_reqs: int,
    num_drafts: int,
    *,
    has_state: bool = False,
    has_lens: bool = False,
) -> list[int]:
    """Return the sizes of a graph's integer inputs, in the order of the inputs, without the block
    table.

    The inputs are token ids, positions and slots, then the places. If the graph verifies drafts,
    the places are replaced by the fields ``rows``, ``most``, ``behind`` and ``slots`` of
    ``DraftInputs``. Query ends and KV lengths follow, then the slots of recurrent states.

    Args:
        num_drafts: k, number of drafts of each request; 0 if the graph verifies no drafts.
        has_state: whether the model has recurrent state.
        has_lens: whether attention in the graph reads query ends and KV lengths on the device, so
            that requests can have different lengths.
    """
    by_request = [num_reqs] * 3 + [num_reqs * 3 * num_drafts] if num_drafts else [num_reqs]
    lens = [num_reqs] * (2 * has_lens + has_state)
    return [num_tokens] * 3 + by_request + lens
