"""Matrix products with weights kept as [in, out], the layout that products with few rows like.

Checkpoints store [out, in]; the transposition happens once, at load, so that eager and replayed
steps share it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.comm.groups import CommGroup


@dataclass(frozen=True)
class Linear:
    """``y = x @ weight + bias`` on this rank's part of the weight.

    Attributes:
        weight: [in, out], contiguous.
        bias: [out] or None.
    """

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out]."""
        if self.bias is None:
            return torch.mm(x, self.weight)
        return torch.addmm(self.bias, x, self.weight)


@dataclass(frozen=True)
class RowParallelLinear:
    """A product whose input is split over the group: partial sums, then one all-reduce.

    Attributes:
        weight: [in / size, out].
        bias: [out] or None; whole on every rank, added once, after the sum.
    """

    weight: Tensor
    bias: Tensor | None
    group: CommGroup

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in / size] -> [n, out]."""
        if self.bias is not None and self.group.size == 1:
            return torch.addmm(self.bias, x, self.weight)
        y = self.group.all_reduce(torch.mm(x, self.weight))
        return y if self.bias is None else y + self.bias
