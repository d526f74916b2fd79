"""Counts how often each token occurs in each row; penalties need these counts on the device.

A step adds only new tokens, so its work does not grow with the length of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.ints import IntArray

IN_PROMPT = 1 << 30  # added to the count of a token that occurs in the prompt

ToDevice = Callable[[np.ndarray], Tensor]


@dataclass(frozen=True)
class Penalties:
    """Penalties and their places, on the device.

    Attributes:
        rows: [m] int64; where: [m] int64, indices of the places.
        repetition, frequency, presence: [m, 1] float32.
    """

    rows: Tensor
    where: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


class TokenCounts:
    """Owns [max_rows, vocab] int32: the number of occurrences in the output, plus IN_PROMPT if the
    token occurs in the prompt.

    Only the counts of rows with penalties are updated.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device, to_device: ToDevice
    ) -> None:
        self._counts = torch.zeros((max_rows, vocab_size), dtype=torch.int32, device=device)
        self._to_device = to_device

    def begin(self, row: int, token_ids: IntArray, num_prompt_tokens: int) -> None:
        """Count all tokens of a request again.

        Args:
            token_ids: [num_tokens], first the prompt, then the output.
        """
        ids, inverse = np.unique(token_ids, return_inverse=True)
        counts = np.bincount(inverse[num_prompt_tokens:], minlength=len(ids)).astype(np.int32)
        counts[inverse[:num_prompt_tokens]] += IN_PROMPT
        self._counts[row].zero_()
        self._counts[row].index_copy_(0, self._upload(ids), self._to_device(counts))

    def add(self, rows: IntArray, token_ids: Tensor) -> None:
        """Count one new token in each of some rows.

        Args:
            rows: [n]; token_ids: [n] int32.
        """
        flat = self._counts.view(-1)
        # An int32 can index all counts, because 2^31 counts would need 8 GiB.
        begins = self._to_device(rows.astype(np.int32) * np.int32(self._counts.shape[1]))
        where = (begins + token_ids).long()
        flat.index_copy_(0, where, flat.index_select(0, where) + 1)

    def penalise(self, logits: Tensor, penalties: Penalties) -> Tensor:
        """Return [n, vocab] logits with repetition, frequency and presence penalties.

        As in vLLM and the OpenAI API, the repetition penalty counts prompt and output; the other
        two penalties count only the output.
        """
        counts = self._counts.index_select(0, penalties.rows)
        values = logits.index_select(0, penalties.where)
        repetition = penalties.repetition
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(counts > 0, repeated, values)
        in_output = torch.where(counts >= IN_PROMPT, counts - IN_PROMPT, counts)
        values = values - penalties.frequency * in_output - penalties.presence * (in_output > 0)
        return logits.index_copy(0, penalties.where, values)

    def _upload(self, indices: np.ndarray) -> Tensor:
        return self._to_device(indices.astype(np.int64))
