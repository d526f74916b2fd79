"""One rank's slices of a checkpoint with Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.comm.groups import CommGroup
from dist_aclgraph.layers.experts import ExpertSetup
from dist_aclgraph.layers.int8_products import Int8GroupedProduct, Int8Linear
from dist_aclgraph.layers.linear import Linear, Product, RowParallelLinear
from dist_aclgraph.layers.local_experts import ExpertProduct, GroupedProduct
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.dummy_weights import DummyCheckpoint
from dist_aclgraph.models.int8_weights import Matrix, beside, of_one_kind

WeightSource = Checkpoint | DummyCheckpoint
NotePlaced = Callable[[int], None]  # bytes of a weight that is on the device


def note_nothing(num_bytes: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class WeightSlices:
    """Cuts one rank's weights out of a checkpoint and puts them on its device.

    Attributes:
        group: tensor parallel ranks among which weights are split.
        experts: how whole experts are divided among ranks, and run.
        note: told of each weight that is there.
    """

    checkpoint: WeightSource
    group: CommGroup
    device: torch.device
    experts: ExpertSetup
    note: NotePlaced = note_nothing

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.place(self.checkpoint.read(name, shape))

    def part(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        """Return ``[start, stop)`` of ``dim``; beyond the tensor's end is zero."""
        return self.checkpoint.read_part(name, shape, dim, start, stop)

    def columns(self, name: str, out: int, width: int, start: int, stop: int) -> Tensor:
        """Output features [start, stop) of an [out, in] weight, transposed."""
        return self.part(name, (out, width), 0, start, stop).t()

    def place(self, weight: Tensor) -> Tensor:
        """Return a weight as it stays: on the device, its elements in order."""
        placed = weight.contiguous().to(self.device)
        self.note(placed.nbytes)
        return placed

    def share(self, width: int) -> tuple[int, int]:
        """This rank's part of an inner width.

        Zero columns pad a width that the group does not divide: silu(0) * 0 = 0.
        """
        part = -(-width // self.group.size)
        return self.group.rank * part, (self.group.rank + 1) * part

    def matrix(self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int) -> Matrix:
        """Return ``[start, stop)`` of ``dim`` of an [out, in] weight, transposed.

        In int8, where the checkpoint or the configuration wants it.
        """
        return self.checkpoint.read_matrix(f"{name}.weight", shape, dim, start, stop)

    def product(self, matrices: Sequence[Matrix], bias: Tensor | None = None) -> Product:
        """Return one product for several, side by side."""
        matrix = beside(matrices, self.checkpoint.dtype)
        weight = self.place(matrix.weight)
        if matrix.scale is None:
            return Linear(weight, bias)
        return Int8Linear(weight, self.place(matrix.scale.flatten()), bias)

    def expert_product(self, count: int, read: Callable[[int], Matrix]) -> ExpertProduct:
        """Return one product of ``count`` experts, with a matrix for each.

        Args:
            read: an expert's matrix; called for one after the other, so that the device holds what
                an expert was cut out of for a moment only.
        """
        dtype, first = self.checkpoint.dtype, read(0)
        shape, device = (count, *first.weight.shape), first.weight.device
        stack = torch.empty(shape, dtype=first.weight.dtype, device=device)
        scales: list[Tensor] = []
        for index, row in enumerate(stack):
            matrix = read(index) if index else first
            if (matrix.scale is None) != (first.scale is None):
                return self._mixed_experts([read(i) for i in range(count)])
            row.copy_(matrix.weight)
            scales += [] if matrix.scale is None else [matrix.scale]
        weight = self.place(stack)
        if not scales:
            return GroupedProduct(weight)
        scale = torch.cat(scales).to(dtype if dtype == torch.bfloat16 else torch.float32)
        return Int8GroupedProduct(weight, self.place(scale))

    def _mixed_experts(self, matrices: Sequence[Matrix]) -> ExpertProduct:
        """Return the product of experts that a checkpoint has in int8 and in floats."""
        weights, _ = of_one_kind(matrices, self.checkpoint.dtype)
        return GroupedProduct(self.place(torch.stack(weights)))

    def fused(self, parts: list[tuple[str, int, int, int]], width: int, has_bias: bool) -> Product:
        """One product for several: of each (name, out features, start, stop), side by side.

        Args:
            width: input features of all.
        """
        matrices = [self.matrix(n, (out, width), 0, a, b) for n, out, a, b in parts]
        bias = None
        if has_bias:
            biases = [self.part(f"{n}.bias", (out,), 0, a, b) for n, out, a, b in parts]
            bias = self.place(torch.cat(biases))
        return self.product(matrices, bias)

    def row_parallel(
        self, name: str, shape: tuple[int, int], start: int, stop: int, has_bias: bool
    ) -> RowParallelLinear:
        """Input features [start, stop) of a [out, in] weight of this shape."""
        matrix = self.matrix(name, shape, 1, start, stop)
        bias = self.whole(f"{name}.bias", shape[:1]) if has_bias else None
        if self.group.size == 1:
            return RowParallelLinear(self.product([matrix], bias), None, self.group)
        return RowParallelLinear(self.product([matrix]), bias, self.group)
