"""A table on the device that replaces references by tokens. The first part of the table contains
the latest tokens, which are not on the host. The second part contains all token ids of the
vocabulary, in ascending order.

One gather operator turns the input numbers of a step into token ids. A negative number is a
reference (``references.py``) and is replaced by its token. Any other number is a token id and does
not change.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TokenTable:
    """Owns the latest tokens of a rank.

    Attributes:
        latest: [num_latest] int32, the tokens for which references stand.
    """

    def __init__(self, vocab_size: int, num_latest: int, device: torch.device) -> None:
        self.num_latest = num_latest
        self._tokens = torch.arange(-num_latest, vocab_size, dtype=torch.int32, device=device)
        self.latest = self._tokens[:num_latest]
        self.latest.zero_()

    def fill_in(self, token_ids: Tensor) -> Tensor:
        """Replace each reference by its token; return the token ids, [n] int32.

        Raises:
            DeviceError: a number is neither a reference nor a token id; raised later, when the
                device runs this operator.
        """
        return self._tokens.index_select(0, token_ids + self.num_latest)
