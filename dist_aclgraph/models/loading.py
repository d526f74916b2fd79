"""One rank's slices of a checkpoint with Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dist_aclgraph.comm.groups import CommGroup
from dist_aclgraph.layers.experts import ExpertSetup
from dist_aclgraph.layers.int8_products import Int8GroupedProduct, Int8Linear
from dist_aclgraph.layers.linear import Linear, Product, RowParallelLinear
from dist_aclgraph.layers.local_experts import ExpertProduct, GroupedProduct
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.dummy_weights import DummyCheckpoint
from dist_aclgraph.models.int8_weights import Matrix

WeightSource = Checkpoint | DummyCheckpoint
NotePlaced = Callable[[int], None]  # bytes of a weight that is on the device


def note_nothing(num_bytes: int) -> None:
    """Ignore the progress."""


@dataclass(frozen=True)
class MatrixPart:
    """``[start, stop)`` of ``dim`` of an [out, in] weight, which is still to be read.

    Attributes:
        shape: of the whole weight.
        rearrange: moves outputs, [n, out] -> [n, out]; None where they stay as they are stored.
    """

    name: str
    shape: tuple[int, int]
    dim: int
    start: int
    stop: int
    rearrange: Callable[[Tensor], Tensor] | None = None

    @property
    def where(self) -> tuple[str, tuple[int, int], int, int, int]:
        """What a checkpoint is asked for."""
        return self.name, self.shape, self.dim, self.start, self.stop

    @property
    def num_inputs(self) -> int:
        return self.shape[1] if self.dim == 0 else self.stop - self.start

    @property
    def num_outputs(self) -> int:
        return self.shape[0] if self.dim == 1 else self.stop - self.start

    def rearranged(self, rearrange: Callable[[Tensor], Tensor]) -> MatrixPart:
        """Let ``rearrange`` move outputs: [n, out] -> [n, out]."""
        return replace(self, rearrange=rearrange)


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
        """Output features [start, stop) of an [out, in] weight in floats, transposed."""
        columns = MatrixPart(name, (out, width), 0, start, stop)
        return self._read([columns], self.checkpoint.dtype)[0]

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

    def matrix(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int
    ) -> MatrixPart:
        """Name ``[start, stop)`` of ``dim`` of an [out, in] weight, for a product."""
        return MatrixPart(f"{name}.weight", shape, dim, start, stop)

    def product(self, parts: Sequence[MatrixPart], bias: Tensor | None = None) -> Product:
        """Return one product for several matrices, side by side."""
        weight, scales = self._read(parts, self._dtype_of(parts))
        weight = self.place(weight)
        if not scales:
            return Linear(weight, bias)
        return Int8Linear(weight, self.place(torch.cat(scales, 1).flatten()), bias)

    def expert_product(self, experts: Sequence[Sequence[MatrixPart]]) -> ExpertProduct:
        """Return one product of experts, each with its matrices side by side."""
        dtype = self._dtype_of(part for parts in experts for part in parts)
        stack = torch.empty((len(experts), *_sizes(experts[0])), dtype=dtype, device=self.device)
        filled = [self._fill(row, parts) for row, parts in zip(stack, experts, strict=True)]
        weight, scales = self.place(stack), [scale for scales in filled for scale in scales]
        if not scales:
            return GroupedProduct(weight)
        wanted = self.checkpoint.dtype
        scale = torch.cat(scales, 1).to(wanted if wanted == torch.bfloat16 else torch.float32)
        return Int8GroupedProduct(weight, self.place(scale.view(len(experts), -1)))

    def _dtype_of(self, parts: Iterable[MatrixPart]) -> torch.dtype:
        """Return what one operator has its matrices in: int8 if all are, else floats.

        What a checkpoint leaves in floats is meant to stay so, also beside matrices in int8.
        """
        are_int8 = all(self.checkpoint.gives_int8(part.name, part.shape) for part in parts)
        return torch.int8 if are_int8 else self.checkpoint.dtype

    def _read(self, parts: Sequence[MatrixPart], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Return matrices side by side, [in, outputs of all], and the scales of those in int8."""
        weight = torch.empty(_sizes(parts), dtype=dtype, device=self.device)
        return weight, self._fill(weight, parts)

    def _fill(self, weight: Tensor, parts: Sequence[MatrixPart]) -> list[Tensor]:
        """Read matrices into ``weight``, one after another: each goes to its columns at once.

        Returns:
            Their scales, [1, out] each, where the weight is int8.
        """
        scales, widths = [], [part.num_outputs for part in parts]
        for part, columns in zip(parts, torch.split(weight, widths, 1), strict=True):
            if weight.dtype == torch.int8:
                matrix = self.checkpoint.read_matrix(*part.where)
            elif part.rearrange is not None:
                matrix = Matrix(self.checkpoint.read_part(*part.where).t())
            else:
                self.checkpoint.write_part(columns.t(), *part.where)
                continue
            if part.rearrange is not None:
                matrix = matrix.rearranged(part.rearrange)
            columns.copy_(matrix.weight.to(self.device))
            if matrix.scale is not None:
                scales.append(matrix.scale.to(self.device))
        return scales

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


def _sizes(parts: Sequence[MatrixPart]) -> tuple[int, int]:
    """Return inputs and outputs of matrices side by side."""
    return parts[0].num_inputs, sum(part.num_outputs for part in parts)
