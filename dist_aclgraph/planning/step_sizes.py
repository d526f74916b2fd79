"""Sizes of the arrays that a rank keeps for its steps. The same functions are used to allocate the
arrays and to predict their memory.
"""

from __future__ import annotations

# The tables of cos and sin have this number of additional positions after the longest context.
# Drafts that will be discarded can have these positions.
SPARE_POSITIONS = 16


def table_width(num_tokens: int, block_size: int, num_drafts: int) -> int:
    """Return the number of columns of the block table. There are enough columns for the tokens and
    for 3 k additional positions of drafts; k is ``num_drafts``.

    A step verifies k drafts after the last token, and drafting uses k positions after these drafts.
    If the host has not read the number of accepted drafts yet, the step's first position can be up
    to k higher than the host assumes.
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
    """Return the number of elements of each integer input of a graph, in the order of the inputs.
    The block table is not included.

    The first inputs are token ids, positions and slots. The indices of the tokens whose logits are
    needed (places) follow. If the graph verifies drafts, the fields ``rows``, ``most``, ``behind``
    and ``slots`` of ``DraftInputs`` replace the places. The last inputs are query ends, KV lengths,
    and the slots of recurrent states.

    Args:
        num_drafts: k, number of drafts of each request; 0 if the graph verifies no drafts.
        has_state: whether the model has recurrent state.
        has_lens: whether attention in the graph reads query ends and KV lengths on the device, so
            that requests can have different lengths.
    """
    by_request = [num_reqs] * 3 + [num_reqs * 3 * num_drafts] if num_drafts else [num_reqs]
    lens = [num_reqs] * (2 * has_lens + has_state)
    return [num_tokens] * 3 + by_request + lens
