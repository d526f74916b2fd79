"""RMS norms of queries and keys: one for each head, or one for all heads of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.comm.groups import CommGroup


@dataclass(frozen=True)
class HeadNorms:
    """Normalises each head on its own.

    Attributes:
        q, k: [head_dim], weights.
    """

    q: Tensor
    k: Tensor
    eps: float

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """[..., heads, head_dim] each -> the same shapes."""
        norm = torch.ops.npu.npu_rms_norm
        return norm(q, self.q, self.eps)[0], norm(k, self.k, self.eps)[0]


@dataclass(frozen=True)
class NormsOfAllHeads:
    """Normalises all heads of a token together, the heads of other ranks included.

    Attributes:
        q, k: [heads * head_dim], weights of this rank's heads.
        group: ranks among which the heads are split. If ranks have copies of KV heads, each head
            has equally many copies, so the copies do not change a mean.
    """

    q: Tensor
    k: Tensor
    eps: float
    group: CommGroup

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """[..., heads, head_dim] each -> the same shapes."""
        rows, weights = (q.flatten(-2), k.flatten(-2)), (self.q, self.k)
        if self.group.size == 1:
            norm = torch.ops.npu.npu_rms_norm
            found = [norm(x, w, self.eps)[0] for x, w in zip(rows, weights, strict=True)]
        else:
            found = self._normalised(rows, weights)
        return found[0].view(q.shape), found[1].view(k.shape)

    def _normalised(self, rows: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Compute in float32, with one all-reduce for all norms."""
        floats = [x.float() for x in rows]
        means = torch.cat([(x * x).mean(-1, keepdim=True) for x in floats], -1)
        factors = (self.group.all_reduce(means) / self.group.size + self.eps).rsqrt().split(1, -1)
        each = zip(floats, factors, weights, strict=True)
        return [(x * factor).to(weight.dtype) * weight for x, factor, weight in each]
