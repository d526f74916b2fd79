"""The embedding and the output head, split over the vocabulary.

If the size of the vocabulary is not a multiple of the group size, rows of zeros are added. The
logits of these rows are removed from the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_aclgraph.comm.groups import CommGroup


def vocabulary_part(vocab_size: int, group: CommGroup) -> tuple[int, int]:
    """Return the range [start, stop) of this rank's token ids. ``stop`` can be larger than
    ``vocab_size``.
    """
    width = -(-vocab_size // group.size)
    return group.rank * width, (group.rank + 1) * width


@dataclass(frozen=True)
class VocabularyEmbedding:
    """The rows of the embedding for this rank's part of the vocabulary.

    Attributes:
        weight: [vocab / size, hidden].
        start: first token id of this rank.
        scale: factor by which rows are multiplied.
    """

    weight: Tensor
    start: int
    group: CommGroup
    scale: float = 1.0

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Map [n] int32 token ids to [n, hidden]. The result is a sum over ranks, because each rank
        has only the rows of its token ids.
        """
        rows = self._rows(token_ids)
        return rows if self.scale == 1 else rows * self.scale

    def _rows(self, token_ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.start
        is_foreign = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(is_foreign, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill(is_foreign.unsqueeze(-1), 0))


@dataclass(frozen=True)
class VocabularyHead:
    """Computes the logits for this rank's part of the vocabulary, and gathers the logits of all
    ranks.

    Attributes:
        weight: [hidden, vocab / size]. With tied embeddings, this is a transposed view of the
            embedding's weight.
        scale: factor by which logits are multiplied.
    """

    weight: Tensor
    vocab_size: int
    group: CommGroup
    scale: float = 1.0

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Map [n, hidden] to [n, vocab]. If ``out`` is given, the result is written to ``out``."""
        logits = self._logits(hidden, out)
        return logits if self.scale == 1 else logits.mul_(self.scale)

    def _logits(self, hidden: Tensor, out: Tensor | None) -> Tensor:
        if self.group.size == 1:
            return torch.mm(hidden, self.weight, out=out)
        parts = self.group.all_gather(torch.mm(hidden, self.weight))  # [size, n, vocab / size]
        whole = parts.transpose(0, 1).reshape(hidden.shape[0], -1)[:, : self.vocab_size]
        return whole if out is None else out.copy_(whole)
