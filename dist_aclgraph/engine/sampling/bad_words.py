"""Bad words of several tokens. The last token of a bad word is forbidden after the word's other
tokens.

With two steps in flight, the host does not know the latest token of a request. So the device
compares the latest token with the bad word, and the host compares all earlier tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray

Words = tuple[tuple[int, ...], ...]


class Forbidden(NamedTuple):
    """Tokens that must not be sampled at some places of a step, if a certain token comes directly
    before them. Each array has one element for each forbidden token, [n].

    Attributes:
        places: index of the place where the token is forbidden; tokens: the forbidden token.
        before: the second-to-last token of the bad word. -1 if the host has already found this
            token in the request; in this case, the device compares nothing.
        coming: index of the token that the device compares with ``before``, in the argument
            ``coming`` of ``forbid``.
    """

    places: IntArray
    tokens: IntArray
    before: IntArray
    coming: IntArray


def find_forbidden(
    words: Mapping[int, Words],
    rows: IntArray,
    positions: IntArray,
    token_ids: IntArray,
    num_known: IntArray,
    begins: IntArray,
    coming_rows: IntArray,
) -> Forbidden | None:
    """Return the tokens that are forbidden at each place where a step samples a token; None if no
    token is forbidden.

    Args:
        words: bad words by row; each word has two tokens or more.
        rows: [n], the row of each place; positions: [n], the position of the token that is sampled
            at each place.
        token_ids: [max_rows, max_len], the tokens that the host has; num_known: [max_rows], the
            number of these tokens in each row.
        begins: [n], for each place, the position where the output of its request begins. A bad word
            is found only if all of its tokens are in the output.
        coming_rows: [m], rows whose last token is sampled by a step in flight.
    """
    found = []
    index_of = {row: index for index, row in enumerate(coming_rows.tolist())}
    for place, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        for word in words.get(row, ()):
            start = position - len(word) + 1
            is_known = position <= num_known[row]
            compared = word[:-1] if is_known else word[:-2]
            if start < begins[place] or not (is_known or row in index_of):
                continue
            if token_ids[row, start : start + len(compared)].tolist() == list(compared):
                before, index = (-1, 0) if is_known else (word[-2], index_of[row])
                found.append((place, word[-1], before, index))
    if not found:
        return None
    return Forbidden(*np.array(found, np.int32).T)


def forbid(
    logits: Tensor,
    forbidden: Forbidden,
    coming: Tensor | None,
    to_device: Callable[[np.ndarray], Tensor],
) -> Tensor:
    """Return the logits, [n, vocab], with -inf for forbidden tokens.

    Args:
        coming: [m] int32, tokens that a step in flight has sampled; None if there are none.
    """
    where = to_device(forbidden.places.astype(np.int64) * logits.shape[1] + forbidden.tokens)
    before = to_device(forbidden.before.copy())
    applies = before < 0
    if coming is not None:
        last = coming.index_select(0, to_device(forbidden.coming.copy()))
        applies = applies | (last == before)
    values = torch.zeros(len(where), dtype=logits.dtype, device=logits.device)
    values = values.masked_fill(applies, -torch.inf)
    return logits.reshape(-1).index_add(0, where, values).view(logits.shape)
