"""Counts, on the device, how often each token occurs in each row. Penalties need these counts.

A step adds only new tokens, so its work does not grow with the length of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray

IN_PROMPT = 0.5  # added to the count of a token that occurs in the prompt

ToDevice = Callable[[np.ndarray], Tensor]


@dataclass(frozen=True)
class Penalties:
    """The penalties of the places where tokens are sampled with penalties, on the device.

    Attributes:
        rows: [m] int64, the row of each place; a slice if the rows are consecutive.
        where: [m] int64, indices of the places; None means all places.
        repetition, frequency, presence: [m, 1] float32, the penalty of each place; None if no place
            has a penalty of this type.
        only_weakens: whether every repetition penalty is at least 1, so that repetition penalties
            never raise a logit.
    """

    rows: Tensor | slice
    where: Tensor | None
    repetition: Tensor | None
    only_weakens: bool
    frequency: Tensor | None
    presence: Tensor | None


class TokenCounts:
    """Owns the counts, [max_rows, vocab] float32: for each token, its number of occurrences in the
    output, plus IN_PROMPT if the token occurs in the prompt.

    The counts have the type of logits, so that no operator has to convert them. Only the counts of
    rows with penalties are updated.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device, to_device: ToDevice
    ) -> None:
        self._counts = torch.zeros((max_rows, vocab_size), dtype=torch.float32, device=device)
        self._to_device = to_device
        # The rows of the last call of ``add``; and a tensor, [n] int64: for each of these rows, the
        # index of the row's first count in the flattened counts.
        self._last: tuple[IntArray, Tensor] | None = None

    def forget(self) -> None:
        """Drop the indices of the last call of ``add`` after an abort of the device. The abort may
        have stopped the copy of the indices to the device.
        """
        self._last = None

    def begin(self, row: int, token_ids: IntArray, num_prompt_tokens: int) -> None:
        """Count all tokens of a request again.

        Args:
            token_ids: [num_tokens], first the prompt, then the output.
        """
        ids, inverse = np.unique(token_ids, return_inverse=True)
        counts = np.bincount(inverse[num_prompt_tokens:], minlength=len(ids)).astype(np.float32)
        counts[inverse[:num_prompt_tokens]] += IN_PROMPT
        self._counts[row].zero_()
        self._counts[row].index_copy_(0, self._upload(ids), self._to_device(counts))

    def add(self, rows: IntArray, token_ids: Tensor) -> None:
        """Count one new token for each of the given rows.

        Args:
            rows: [n], rows; each row occurs at most once.
            token_ids: [n] int32, for each row, the new token.
        """
        flat = self._counts.view(-1)
        if self._last is None or not np.array_equal(rows, self._last[0]):
            self._last = rows, self._to_device(rows.astype(np.int64) * self._counts.shape[1])
        where = self._last[1] + token_ids
        flat.index_copy_(0, where, flat.index_select(0, where).add_(1))

    def penalise(self, logits: Tensor, penalties: Penalties) -> Tensor:
        """Return the logits, [n, vocab], after repetition, frequency and presence penalties.

        As in vLLM and the OpenAI API, the repetition penalty depends on prompt and output. The
        other two penalties depend only on the output.
        """
        rows, where = penalties.rows, penalties.where
        if isinstance(rows, slice):
            counts = self._counts[rows]
        else:
            counts = self._counts.index_select(0, rows)
        values = logits if where is None else logits.index_select(0, where)
        if penalties.repetition is not None:
            weaker, stronger = values / penalties.repetition, values * penalties.repetition
            # A penalty divides positive logits and multiplies negative logits. If the penalty is at
            # least 1, the result is min(logit / penalty, logit * penalty).
            if penalties.only_weakens:
                repeated = torch.minimum(weaker, stronger)
            else:
                repeated = torch.where(values > 0, weaker, stronger)
            values = torch.where(counts > 0, repeated, values)
        if penalties.frequency is not None:
            values = values.addcmul(penalties.frequency, counts.floor(), value=-1)
        if penalties.presence is not None:
            values = torch.where(counts >= 1, values - penalties.presence, values)
        return values if where is None else logits.index_copy(0, where, values)

    def _upload(self, indices: np.ndarray) -> Tensor:
        return self._to_device(indices.astype(np.int64))
