"""Checks token ids: an id is the index of a row of the embedding, from 0 to vocab_size - 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.errors import InvalidParameterError


def check_token_ids(ids: Sequence[int] | IntArray, vocab_size: int, param: str) -> None:
    """Check that the model has all these token ids.

    Args:
        param: the field of the request that contains the ids.

    Raises:
        InvalidParameterError: an id is not valid; the message contains the first such id, and the
            limit.
    """
    array = np.asarray(ids)
    is_other = (array < 0) | (array >= vocab_size)
    if is_other.any():
        raise InvalidParameterError(
            f"{param} holds {array[is_other.argmax()]}; token ids lie in [0, {vocab_size})", param
        )
