"""Finds out whether a request's token lists and its output format have at least one allowed token
in common.

The lists are ``allowed_token_ids`` and ``bad_words``; the device applies them. If the lists and the
output format together forbid every token, a sampled token is meaningless.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dist_aclgraph.arrays.ints import IntArray, unpack_ints
from dist_aclgraph.steps.step import RowSampling

BITS = 32
ALL = np.int32(-1)
FORBIDS_ALL = (
    "allowed_token_ids or bad_words forbid every token that the form of the answer allows next; "
    "allow more tokens, or change the form"
)


class Permitted:
    """The tokens that ``allowed_token_ids`` and ``bad_words`` of one row permit.

    Args:
        num_words: number of words of a mask.
    """

    def __init__(self, sampling: RowSampling, num_words: int) -> None:
        self._bad_words = sampling.bad_words
        self._words = np.full(num_words, 0 if sampling.allowed else ALL, np.int32)
        for token in unpack_ints(sampling.allowed).tolist():
            set_bit(self._words, token)
        forbidden = unpack_ints(sampling.biased)[np.isneginf(np.frombuffer(sampling.biases, "<f4"))]
        for token in forbidden.tolist():
            clear_bit(self._words, token)

    @staticmethod
    def of_row(sampling: RowSampling, num_words: int) -> Permitted | None:
        """Return the permitted tokens of a row; None if its lists permit every token."""
        has_lists = sampling.allowed or sampling.biased or sampling.bad_words
        return Permitted(sampling, num_words) if has_lists else None

    @property
    def longest(self) -> int:
        """Maximum number of latest output tokens that are compared with ``bad_words``."""
        return max((len(word) - 1 for word in self._bad_words), default=0)

    def leaves_any(self, mask: IntArray, latest: Sequence[int]) -> bool:
        """Return whether the lists permit at least one of the tokens that ``mask`` allows.

        Args:
            mask: [num_words].
            latest: the last ``longest`` tokens of the output, or all tokens of a shorter output.
        """
        left = mask & self._words
        for word in self._bad_words:
            if tuple(latest[len(latest) - len(word) + 1 :]) == word[:-1]:
                clear_bit(left, word[-1])
        return bool(left.any())


def set_bit(words: IntArray, token: int) -> None:
    words.view(np.uint32)[token // BITS] |= np.uint32(1 << token % BITS)


def clear_bit(words: IntArray, token: int) -> None:
    words.view(np.uint32)[token // BITS] &= ~np.uint32(1 << token % BITS)
