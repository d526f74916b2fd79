"""Matrix products. Weights are stored as [in, out]. This layout is the best for products with few
rows.

Checkpoints store [out, in]. Weights are transposed once, when they are loaded, so that eager and
replayed steps use the same tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from dist_aclgraph.comm.groups import CommGroup
from dist_aclgraph.layers.int8_rows import Rows, in_floats


class Product(Protocol):
    """A product with a weight of any type: float in this file, int8 in ``int8_products.py``.

    Attributes:
        quantises_rows: whether the product multiplies rows in int8. If false, the product does not
            accept ``Int8Rows``.
    """

    quantises_rows: ClassVar[bool]

    @property
    def weight(self) -> Tensor:
        """The weight, [in, out]."""

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """Map [n, in] to [n, out]. If ``out`` is given, the result is written to ``out``."""


@dataclass(frozen=True)
class Linear:
    """``y = x @ weight + bias`` on this rank's part of the weight.

    Attributes:
        weight: [in, out], contiguous.
        bias: [out] or None.
    """

    quantises_rows: ClassVar[bool] = False

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """Map [n, in] to [n, out]. If ``out`` is given, the result is written to ``out``."""
        x = in_floats(x)
        if self.bias is None:
            return torch.mm(x, self.weight, out=out)
        return torch.addmm(self.bias, x, self.weight, out=out)


@dataclass(frozen=True)
class RowParallelLinear:
    """A product whose input is split over the ranks of a group. One all-reduce adds the ranks'
    partial sums.

    Attributes:
        product: maps [n, in / size] to [n, out]. If the group has only one rank, ``product`` adds
            the bias, and ``bias`` is None.
        bias: [out] or None. Every rank has the whole bias, and adds it after the all-reduce.
    """

    product: Product
    bias: Tensor | None
    group: CommGroup

    def __call__(self, x: Rows) -> Tensor:
        """Map this rank's inputs, [n, in / size], to [n, out], the sum over the ranks."""
        y = self.group.all_reduce(self.product(x))
        return y if self.bias is None else y + self.bias
