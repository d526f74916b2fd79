"""Converts matrices of four bits to the layout that the operators need, and makes product objects
with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dist_aclgraph.errors import ConfigError
from dist_aclgraph.layers.int4_products import (
    W4A8GroupedProduct,
    W4A8Linear,
    W4A16GroupedProduct,
    W4A16Linear,
)
from dist_aclgraph.layers.linear import Product
from dist_aclgraph.layers.local_experts import ExpertProduct
from dist_aclgraph.models.int4_weights import PackedInt4Matrix
from dist_aclgraph.shapes.int4_formats import EXPERT_INPUTS, INT8_GROUP, Int4Format


class SharedZeros:
    """Owns a tensor of zeros with the size of the largest requested tensor. Smaller tensors are
    views of it.
    """

    def __init__(self) -> None:
        self._zeros = torch.empty(0)

    def like(self, tensor: Tensor, place: Callable[[Tensor], Tensor]) -> Tensor:
        """Return zeros with the shape and type of ``tensor``. The caller must not change the zeros.

        Args:
            place: puts a new tensor on the device.
        """
        if self._zeros.numel() < tensor.numel() or self._zeros.dtype != tensor.dtype:
            self._zeros = place(torch.zeros(tensor.numel(), dtype=tensor.dtype))
        return self._zeros[: tensor.numel()].view(tensor.shape)


class Int4Weights:
    """A stack of matrices with the same size. A matrix may consist of several parts, whose outputs
    are joined.
    """

    def __init__(
        self,
        name: str,
        form: Int4Format,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        place: Callable[[Tensor], Tensor],
    ) -> None:
        """Make an empty stack on the device.

        Args:
            name: name of one of the matrices, for error messages.
            sizes: the number of matrices, and each matrix's number of inputs and number of outputs.
            dtype: type of the rows that are multiplied, and of the results.
            place: puts a tensor on the device, and records its number of bytes.

        Raises:
            ConfigError: the operators do not accept matrices of these sizes.
        """
        count, num_inputs, num_outputs = sizes
        self._name, self._form, self._num_inputs = name, form, num_inputs
        self._dtype, self._place = dtype, place
        self._require(num_outputs, 8, "outputs")
        self._bytes = torch.empty(
            (count, num_inputs, num_outputs // 2), dtype=torch.int8, device=device
        )
        self._scales: list[Tensor] = []  # [groups, outputs] of each matrix
        self._sums: list[Tensor] = []  # ``sums`` of each ``PackedInt4Matrix``, if not None

    def fill(self, index: int, parts: Sequence[PackedInt4Matrix]) -> None:
        """Write the matrix with the index ``index``. The matrices must be written in order.

        Raises:
            ConfigError: a part has an odd number of outputs. Each byte contains two outputs of the
                same part.
        """
        assert index == len(self._scales)
        widths = [len(part.pairs) for part in parts]
        if sum(widths) != self._bytes.shape[2]:
            raise ConfigError(
                f"a rank's part of {self._name} or of a matrix beside it, with values of four "
                "bits, has an odd number of outputs: choose another parallel.tp"
            )
        columns = torch.split(self._bytes[index], widths, 1)
        for there, part in zip(columns, parts, strict=True):
            there.copy_(part.pairs.to(there.device).t())
        self._scales.append(torch.cat([part.scales for part in parts]).t())
        if self._form.quantises_rows:
            self._sums.append(torch.cat([part.sums for part in parts if part.sums is not None]))

    def linear(self, bias: Tensor | None) -> Product:
        """Return the product for a stack with only one matrix.

        Args:
            bias: [outputs], with the type of the rows; or None.
        """
        weight, scale = self._words()[0], self._scales[0]
        if not self._form.quantises_rows:
            wide = bias.float() if bias is not None and self._dtype == torch.bfloat16 else bias
            return W4A16Linear(weight, self._place(scale.to(self._dtype)), wide)
        self._require(self._num_inputs, INT8_GROUP, "inputs")
        groups = self._num_inputs // INT8_GROUP
        scale = scale.expand(groups, -1) if len(scale) == 1 else scale
        return W4A8Linear(weight, self._place(_prepared(scale)), self._place(self._sums[0]), bias)

    def grouped(self, zeros: SharedZeros) -> ExpertProduct:
        """Return the product for a stack that has one matrix for each expert."""
        weight, scale = self._words(), torch.stack(self._scales)
        if not self._form.quantises_rows:
            scale = self._place(scale.to(self._dtype))
            return W4A16GroupedProduct(weight, scale, zeros.like(scale, self._place))
        self._require(self._num_inputs, EXPERT_INPUTS, "inputs")
        return W4A8GroupedProduct(
            weight, self._place(_prepared(scale)), self._place(torch.stack(self._sums))
        )

    def _words(self) -> Tensor:
        """Return the weights, with eight outputs packed in each element: [matrices, in, out / 8]
        int32.
        """
        return self._place(self._bytes.view(torch.int32))

    def _require(self, size: int, factor: int, what: str) -> None:
        if size % factor:
            raise ConfigError(
                f"a rank has {size} {what} of {self._name}, which has values of four bits; the "
                f"number must be a multiple of {factor}: choose another parallel.tp, or "
                "parallel.ep for experts"
            )


def _prepared(scale: Tensor) -> Tensor:
    """Return the bits of float32 scales as int64, because the operators for int8 rows need this
    type.
    """
    return scale.float().contiguous().view(torch.int32).to(torch.int64)
