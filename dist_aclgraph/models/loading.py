"""Loads one rank's slices of a checkpoint that uses Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dist_aclgraph.comm.groups import CommGroup
from dist_aclgraph.layers.experts import ExpertSetup
from dist_aclgraph.layers.int8_products import (
    Int8GroupedProduct,
    Int8Linear,
    Int8SwigluProduct,
    fills_blocks,
    in_blocks,
)
from dist_aclgraph.layers.int8_rows import Int8Norm, swiglu_to_int8
from dist_aclgraph.layers.linear import Linear, Product, RowParallelLinear
from dist_aclgraph.layers.local_experts import (
    ActivatedProduct,
    Activation,
    ExpertProduct,
    GroupedProduct,
    InnerProduct,
    geglu,
    squared_relu,
    swiglu,
)
from dist_aclgraph.layers.norm import NoNorm, Norm, RmsNorm
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.dummy_weights import DummyCheckpoint
from dist_aclgraph.models.fusions import Fusions
from dist_aclgraph.models.int4_products import Int4Weights, SharedZeros
from dist_aclgraph.models.int8_weights import Matrix
from dist_aclgraph.shapes.int4_formats import Int4Format
from dist_aclgraph.shapes.model_spec import Activation as ActivationName

WeightSource = Checkpoint | DummyCheckpoint
# A function that is called after each weight is on the device, with the weight's number of bytes.
NotePlaced = Callable[[int], None]


def note_nothing(num_bytes: int) -> None:
    """Ignore the progress."""


@dataclass(frozen=True)
class MatrixPart:
    """Describes a part of an [out, in] weight that will be read later: the range ``[start, stop)``
    of the dimension ``dim``.

    Attributes:
        shape: shape of the whole weight.
        rearrange: changes the order of outputs, [..., out] -> [..., out]; None keeps the stored
            order.
    """

    name: str
    shape: tuple[int, int]
    dim: int
    start: int
    stop: int
    rearrange: Callable[[Tensor], Tensor] | None = None

    @property
    def where(self) -> tuple[str, tuple[int, int], int, int, int]:
        """The arguments with which the methods of a checkpoint read this part."""
        return self.name, self.shape, self.dim, self.start, self.stop

    @property
    def num_inputs(self) -> int:
        return self.shape[1] if self.dim == 0 else self.stop - self.start

    @property
    def num_outputs(self) -> int:
        return self.shape[0] if self.dim == 1 else self.stop - self.start

    def rearranged(self, rearrange: Callable[[Tensor], Tensor]) -> MatrixPart:
        """Return this part with its outputs in another order; see the attribute ``rearrange``."""
        return replace(self, rearrange=rearrange)


@dataclass(frozen=True)
class WeightSlices:
    """Reads one rank's weights from a checkpoint, and copies them to the rank's device.

    Attributes:
        group: the tensor parallel ranks over which weights are split.
        experts: settings for experts, such as the division of experts among ranks.
        note: called after each weight is on the device, with the weight's number of bytes.
        zeros: one tensor of zeros for all products of experts that need offsets.
        fusions: the fused operators that layers may use.
    """

    checkpoint: WeightSource
    group: CommGroup
    device: torch.device
    experts: ExpertSetup
    note: NotePlaced = note_nothing
    zeros: SharedZeros = field(default_factory=SharedZeros)
    fusions: Fusions = field(default_factory=Fusions.none)

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of this name."""
        return name in self.checkpoint

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.place(self.checkpoint.read(name, shape))

    def part(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        """Return the range ``[start, stop)`` of a tensor's dimension ``dim``. Elements after the
        tensor's end are zero.
        """
        return self.checkpoint.read_part(name, shape, dim, start, stop)

    def columns(self, name: str, out: int, width: int, start: int, stop: int) -> Tensor:
        """Return the outputs [start, stop) of an [out, in] weight, transposed and in floats."""
        columns = MatrixPart(name, (out, width), 0, start, stop)
        return self._read([columns], self.checkpoint.dtype)[0]

    def stack(
        self,
        name: str,
        shape: tuple[int, ...],
        members: Sequence[int],
        dim: int,
        start: int,
        stop: int,
        *,
        has_blocks: bool = False,
    ) -> Tensor:
        """Return parts of some members of a stack of tensors. A member is one tensor of the stack.
        Each part is the range ``[start, stop)`` of a member's dimension ``dim``.

        Args:
            shape: shape of the stack; the first dimension is the number of members.
            dim: dimension of a member.
            has_blocks: whether members are [out, in] matrices, which may be stored in FP8.
        """
        rest = list(shape[1:])
        rest[dim] = stop - start
        size = (len(members), *rest)
        stacked = torch.empty(size, dtype=self.checkpoint.dtype, device=self.device)
        for row, member in zip(stacked, members, strict=True):
            where = name, shape, member, dim, start, stop
            row.copy_(self.checkpoint.read_member(*where, has_blocks=has_blocks))
        return stacked

    def place(self, weight: Tensor) -> Tensor:
        """Copy a weight to the device. Return the copy, which is contiguous."""
        placed = weight.contiguous().to(self.device)
        self.note(placed.nbytes)
        return placed

    def share(self, width: int) -> tuple[int, int]:
        """Return this rank's range [start, stop) of an inner width.

        If the width is not a multiple of the group size, columns of zeros are added. These columns
        do not change results, because silu(0) * 0 = 0.
        """
        part = -(-width // self.group.size)
        return self.group.rank * part, (self.group.rank + 1) * part

    def matrix(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int
    ) -> MatrixPart:
        """Describe the range ``[start, stop)`` of the dimension ``dim`` of an [out, in] weight.
        This method reads nothing.
        """
        return MatrixPart(f"{name}.weight", shape, dim, start, stop)

    def are_int8(self, parts: Sequence[MatrixPart]) -> bool:
        """Return whether products use all of these matrices in int8."""
        return all(self._form_of([part]) == torch.int8 for part in parts)

    def product(self, parts: Sequence[MatrixPart], bias: Tensor | None = None) -> Product:
        """Return one product for several matrices, whose outputs are concatenated."""
        form = self._form_of(parts)
        if isinstance(form, Int4Format):
            return self._read_int4([parts], form).linear(bias)
        weight, scales = self._read(parts, form)
        weight = self.place(weight)
        if not scales:
            return Linear(weight, bias)
        scale = self.place(torch.cat(scales, 1).flatten())
        return Int8Linear(self._in_best_format(weight), scale, bias)

    def expert_product(self, experts: Sequence[Sequence[MatrixPart]]) -> ExpertProduct:
        """Return one product for several experts. The matrices of each expert are concatenated."""
        form = self._form_of(part for parts in experts for part in parts)
        if isinstance(form, Int4Format):
            return self._read_int4(experts, form).grouped(self.zeros)
        stack = torch.empty((len(experts), *_sizes(experts[0])), dtype=form, device=self.device)
        filled = [self._fill(row, parts) for row, parts in zip(stack, experts, strict=True)]
        weight, scales = self.place(stack), [scale for scales in filled for scale in scales]
        if not scales:
            return GroupedProduct(weight)
        wanted = self.checkpoint.dtype
        scale = torch.cat(scales, 1).to(wanted if wanted == torch.bfloat16 else torch.float32)
        scale = self.place(scale.view(len(experts), -1))
        return Int8GroupedProduct(self._in_best_format(weight), scale)

    def _in_best_format(self, weight: Tensor) -> Tensor:
        """Return int8 matrices, [..., in, out], in the storage format of this rank's products (ND
        or FRACTAL_NZ).
        """
        fits = fills_blocks(weight) and self.fusions.use("nz_weights", weight.shape[-1])
        return in_blocks(weight) if fits else weight

    def norm_before(self, norm: Norm | NoNorm, quantises_rows: bool) -> Norm | NoNorm | Int8Norm:
        """Return a norm. The norm's results are floats or int8, as the layers after the norm
        require.

        Args:
            quantises_rows: whether only int8 products read the results.
        """
        if not isinstance(norm, RmsNorm):
            return norm
        fits = quantises_rows and not norm.adds_one
        return Int8Norm(norm) if fits and self.fusions.use("norm_quant", len(norm.weight)) else norm

    def activation(
        self, down: Product | ExpertProduct, kind: ActivationName = "silu"
    ) -> Activation:
        """Return an activation. The activation's results are floats or int8, as the product
        ``down`` requires.
        """
        if kind != "silu":
            return geglu if kind == "gelu_pytorch_tanh" else squared_relu
        fuses = down.quantises_rows and self.fusions.use("swiglu_quant", down.weight.shape[-2])
        return swiglu_to_int8 if fuses else swiglu

    def inner_product(self, gate_up: ExpertProduct, down: ExpertProduct) -> InnerProduct:
        """Return an object that multiplies rows by the experts' weights of gate and up, and applies
        the activation. The results are floats or int8, as the product ``down`` requires.
        """
        width = down.weight.shape[-2]
        if (
            isinstance(gate_up, Int8GroupedProduct)
            and down.quantises_rows
            and fills_blocks(gate_up.weight)
            and self.fusions.use("expert_swiglu_quant", width)
        ):
            return Int8SwigluProduct.replacing(gate_up)
        return ActivatedProduct(gate_up, self.activation(down))

    def _form_of(self, parts: Iterable[MatrixPart]) -> torch.dtype | Int4Format:
        """Return the common form in which one operator can read all of these matrices.

        If all matrices have the same form, this form is the result. Otherwise the result is floats,
        because matrices that a checkpoint stores in floats must not be quantised.
        """
        forms = {self.checkpoint.form_of(part.name, part.shape) for part in parts}
        return forms.pop() if len(forms) == 1 else self.checkpoint.dtype

    def _read_int4(self, stack: Sequence[Sequence[MatrixPart]], form: Int4Format) -> Int4Weights:
        """Return a stack of matrices of four bits. Each matrix of the result is the concatenation
        of the matrices in one element of ``stack``.
        """
        num_inputs, num_outputs = _sizes(stack[0])
        weights = Int4Weights(
            stack[0][0].name,
            form,
            (len(stack), num_inputs, num_outputs),
            self.checkpoint.dtype,
            self.device,
            self.place,
        )
        for i, parts in enumerate(stack):
            weights.fill(i, [self.checkpoint.read_int4(*p.where, p.rearrange) for p in parts])
        return weights

    def _read(self, parts: Sequence[MatrixPart], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Return the matrices, concatenated to [in, all outputs], and their scales if they are
        int8.
        """
        weight = torch.empty(_sizes(parts), dtype=dtype, device=self.device)
        return weight, self._fill(weight, parts)

    def _fill(self, weight: Tensor, parts: Sequence[MatrixPart]) -> list[Tensor]:
        """Read the matrices one after another. Each matrix is read directly into its columns of
        ``weight``.

        Returns:
            The scales of the matrices, [1, out] each; an empty list if the weight is not int8.
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
        """Return one product that computes the outputs of several weights and concatenates them.

        Args:
            parts: for each weight, its name, its number of outputs, and the range [start, stop) of
                the outputs that are used.
            width: number of inputs of each weight.
        """
        matrices = [self.matrix(n, (out, width), 0, a, b) for n, out, a, b in parts]
        return self.joined(matrices, has_bias)

    def joined(self, matrices: Sequence[MatrixPart], has_bias: bool) -> Product:
        """Return one product for the outputs that ``matrices`` describes. If ``has_bias`` is true,
        the product also adds the biases of these outputs.
        """
        bias = self.place(torch.cat([self._bias(m) for m in matrices])) if has_bias else None
        return self.product(matrices, bias)

    def _bias(self, matrix: MatrixPart) -> Tensor:
        name = matrix.name.removesuffix("weight") + "bias"
        bias = self.part(name, matrix.shape[:1], 0, matrix.start, matrix.stop)
        return bias if matrix.rearrange is None else matrix.rearrange(bias)

    def row_parallel(
        self, name: str, shape: tuple[int, int], start: int, stop: int, has_bias: bool
    ) -> RowParallelLinear:
        """Return the row-parallel product with the inputs [start, stop) of an [out, in] weight."""
        matrix = self.matrix(name, shape, 1, start, stop)
        bias = self.whole(f"{name}.bias", shape[:1]) if has_bias else None
        if self.group.size == 1:
            return RowParallelLinear(self.product([matrix], bias), None, self.group)
        return RowParallelLinear(self.product([matrix]), bias, self.group)


def _sizes(parts: Sequence[MatrixPart]) -> tuple[int, int]:
    """Return the number of inputs and the number of outputs of the concatenated matrices."""
    return parts[0].num_inputs, sum(part.num_outputs for part in parts)


def part_by_part(widths: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return a function that changes the order of outputs. The outputs are stored head by head, and
    each head has several parts.

    Args:
        widths: number of outputs of each part of a head. In the new order, the first parts of all
            heads are followed by the second parts of all heads, and so on.
    """

    def rearrange(outputs: Tensor) -> Tensor:
        heads = outputs.reshape(*outputs.shape[:-1], -1, sum(widths))
        return torch.cat([part.flatten(-2) for part in torch.split(heads, list(widths), -1)], -1)

    return rearrange
