"""The tokens that ids name: those of the vocabulary, and behind them the latest tokens, which only
the device has. So one gather fills in a step's tokens, whatever names them (``references.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dist_aclgraph.steps.references import first_reference


class TokenTable:
    """Owns the latest tokens of a rank.

    Attributes:
        latest: [num_latest] int32; a reference names one of them.
    """

    def __init__(self, vocab_size: int, num_latest: int, device: torch.device) -> None:
        first = first_reference(vocab_size)
        self._tokens = torch.arange(first + num_latest, dtype=torch.int32, device=device)
        self.latest = self._tokens[first:]
        self.latest.zero_()

    def fill_in(self, token_ids: Tensor) -> Tensor:
        """Return token ids, [n] int32, with references replaced by what they name."""
        return self._tokens.index_select(0, token_ids)
