"""Normalisation of queries and keys, either of each head on its own, or of all heads of a token
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from dist_aclgraph.comm.groups import CommGroup
from dist_aclgraph.layers.norm import RmsNorm


@dataclass(frozen=True)
class HeadNorms:
    """Normalises each head on its own.

    Attributes:
        q, k: the norms of query heads and of key heads, with weights of [head_dim].
    """

    q: RmsNorm
    k: RmsNorm

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised q and k, with the same shapes: [..., heads, head_dim] each."""
        return self.q(q), self.k(k)


@dataclass(frozen=True)
class CenteredHeadNorms:
    """Normalises each head after subtracting its mean. Each head has its own weights.

    Attributes:
        q, k: [heads, head_dim], weights of this rank's heads.
    """

    q: Tensor
    k: Tensor
    eps: float

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised q and k, with the same shapes: [..., heads, head_dim] each."""
        width = self.q.shape[1:]
        of_q, of_k = (layer_norm(x, width, eps=self.eps) for x in (q, k))
        return of_q * self.q, of_k * self.k


@dataclass(frozen=True)
class NormsOfAllHeads:
    """Normalises all heads of a token together, including the heads of other ranks.

    Attributes:
        q, k: [heads * head_dim], weights of this rank's heads.
        group: ranks among which the heads are split. Several ranks can have copies of the same KV
            head. All KV heads then have equally many copies, and the mean over all heads stays the
            same.
    """

    q: Tensor
    k: Tensor
    eps: float
    group: CommGroup

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised q and k, with the same shapes: [..., heads, head_dim] each."""
        norm = torch.ops.npu.npu_rms_norm
        own_q, scale_q = norm(q.flatten(-2), self.q, self.eps)
        own_k, scale_k = norm(k.flatten(-2), self.k, self.eps)
        if self.group.size > 1:
            scales = torch.cat([scale_q, scale_k], -1)
            own_q, own_k = self._rescaled((own_q, own_k), scales)
        return own_q.view(q.shape), own_k.view(k.shape)

    def _rescaled(self, own: Sequence[Tensor], scales: Tensor) -> list[Tensor]:
        """Apply the scale of all heads, in place of the scale that was computed from this rank's
        heads.

        A scale is ``(mean of squares + eps) ** -0.5``. For all heads together, ``scale ** -2`` is
        the mean of the ranks' values of ``scale ** -2``. One all-reduce is enough for the norms of
        queries and keys.

        Args:
            own: q and k, normalised with this rank's scales; scales: [..., 2] float32, this rank's
                scales for q and for k.
        """
        means = self.group.all_reduce((scales * scales).reciprocal()) / self.group.size
        factors = torch.split(means.rsqrt() / scales, 1, -1)
        return [(x * factor).to(x.dtype) for x, factor in zip(own, factors, strict=True)]
