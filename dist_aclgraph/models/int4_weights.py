"""Matrices with values of four bits, as ModelSlim and compressed-tensors store them.

All functions of this module run on the host, because an NPU has no fast operators on bits. A value
is between -8 and 7. A checkpoint stores an [out, in] matrix in one of four forms, which differ in
the tensor's name and shape:

- ``weight_packed`` [out, in / 8] int32: each element contains the values of eight inputs, the first
  input in the lowest bits; 8 was added to each value (compressed-tensors, pack-quantized);
- ``weight`` [out, in] int8: one value per byte (compressed-tensors, int-quantized; old ModelSlim);
- ``weight`` [out / 2, in] int8: each byte contains the values of two outputs, the first output in
  the low bits (ModelSlim);
- ``weight`` [out, in / 2] int8: each byte contains the values of two inputs (ModelSlim, W4A16
  without groups).

Scales are stored in ``weight_scale``, which has out * groups elements, in any shape. ModelSlim's
W4A8 with groups multiplies ``weight_scale`` [out, 1] by ``weight_scale_second`` [out, groups].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dist_aclgraph.errors import ConfigError, MissingTensorError, ModelError, UnsupportedModelError
from dist_aclgraph.shapes.int4_formats import SMALLEST_GROUP, Int4Format

OFFSETS = ("weight_offset", "weight_offset_second", "weight_zero_point")


@dataclass(frozen=True)
class PackedInt4Matrix:
    """A part of a matrix, with two outputs in each byte. The number of outputs, ``out``, is even.

    Attributes:
        pairs: [out / 2, in] int8, the first output in the low bits.
        scales: [out, groups] float32, one scale for each group of inputs. All groups have the same
            number of inputs.
        sums: [out] float32: for each output, 8 times the sum of its weights; None if the product
            does not need these sums.
    """

    pairs: Tensor
    scales: Tensor
    sums: Tensor | None = None

    def values(self) -> Tensor:
        """Return the values, [out, in] int8."""
        return torch.stack(_halves(self.pairs), 1).flatten(0, 1)

    def floats(self) -> Tensor:
        """Return the matrix in float32, [out, in]."""
        grouped = self.values().float().view(*self.scales.shape, -1)
        return (grouped * self.scales[:, :, None]).flatten(1)

    def rearranged(self, rearrange: Callable[[Tensor], Tensor]) -> PackedInt4Matrix:
        """Return the matrix with its outputs in another order.

        Args:
            rearrange: changes the order of columns, [n, out] -> [n, out].
        """
        values, scales = (rearrange(tensor.t()).t() for tensor in (self.values(), self.scales))
        return PackedInt4Matrix(pack_pairs(values.contiguous()), scales)

    def with_sums(self) -> PackedInt4Matrix:
        grouped = (len(self.pairs), self.scales.shape[1], -1)
        sums = [half.view(grouped).sum(2, dtype=torch.int32) for half in _halves(self.pairs)]
        total = torch.stack(sums, 1).flatten(0, 1) * self.scales
        return replace(self, sums=8 * total.sum(1))


class StoredInt4:
    """A matrix of four-bit values in a checkpoint."""

    def __init__(
        self,
        module: str,
        shape: tuple[int, int],
        form: Int4Format,
        find: Callable[[str], Any],
        has: Callable[[str], bool],
    ) -> None:
        """Describe a matrix; the constructor reads nothing.

        Args:
            module: name of the matrix without ``.weight``.
            shape: [out, in].
            find: takes a tensor's name, and returns the tensor as a slice object of safetensors.
            has: takes a tensor's name, and returns whether the checkpoint has this tensor.
        """
        self._module, self._shape, self._form = module, shape, form
        self._find, self._has = find, has

    def read(self, dim: int, start: int, stop: int) -> PackedInt4Matrix:
        """Return the range ``[start, stop)`` of the matrix's dimension ``dim``. Values after the
        matrix's end are zero. If the number of outputs is odd, an output of zeros is added.

        Raises:
            ConfigError: a range of inputs cannot be divided into groups that the operators accept,
                or a range of outputs begins at an odd index.
            MissingTensorError: a tensor is missing, or has another shape.
            ModelError: a tensor has another type, or values that do not fit into four bits.
            UnsupportedModelError: the values have offsets.
        """
        self._refuse_offsets()
        scales, (out, num_inputs) = self._scales(), self._shape
        if dim == 1:
            first, last = min(start, num_inputs), min(stop, num_inputs)
            pairs = self._pairs(0, out, first, last)
            missing = stop - start - (last - first)
            scales = pad(self._regrouped(scales, start, stop), (0, 0, 0, out % 2))
            return PackedInt4Matrix(pad(pairs, (0, missing)), scales)
        if start % 2:
            raise ConfigError(
                f"a rank's outputs of {self._module}, which has values of four bits, begin at "
                f"{start}, an odd number: choose another parallel.tp"
            )
        # Scales are regrouped, because the last group can be shorter than the other groups.
        scales = self._regrouped(scales, 0, num_inputs)
        first, last, stop = min(start, out), min(stop, out), stop + stop % 2
        pairs = self._pairs(first, last, 0, num_inputs)
        below = (0, 0, 0, (stop - start) // 2 - len(pairs))
        missing = stop - start - (last - first)
        return PackedInt4Matrix(pad(pairs, below), pad(scales[first:last], (0, 0, 0, missing)))

    def read_floats(self, dim: int, start: int, stop: int) -> Tensor:
        """Return the range ``[start, stop)`` of the matrix's dimension ``dim`` in float32. Any
        range is possible.

        Raises:
            ConfigError, MissingTensorError, UnsupportedModelError: see ``read``.
        """
        if dim == 1:
            return self.read(0, 0, self._shape[0]).floats()[: self._shape[0], start:stop]
        return self.read(0, start - start % 2, stop).floats()[start % 2 :][: stop - start]

    def _pairs(self, first: int, last: int, left: int, right: int) -> Tensor:
        """Return the outputs [first, last) and the inputs [left, right) of the matrix, with two
        outputs in each byte.

        Args:
            first: an even number.
        """
        out, num_inputs = self._shape
        if self._has(f"{self._module}.weight_packed"):
            source = self._find(f"{self._module}.weight_packed")
            self._check(source, "weight_packed", ("I32",), [(out, -(-num_inputs // 8))])
            words: Tensor = source[first:last, left // 8 : -(-right // 8)]
            # The stored number is the value plus 8. Inverting the highest bit of this number gives
            # the value in two's complement.
            pairs = _turned(words.contiguous().view(torch.uint8) ^ 0x88)
            return pairs[:, left % 8 :][:, : right - left]
        source = self._find(f"{self._module}.weight")
        kinds = [(out, num_inputs), (-(-out // 2), num_inputs), (out, -(-num_inputs // 2))]
        kind = kinds.index(self._check(source, "weight", ("I8", "U8"), kinds))
        if kind == 0:
            values: Tensor = source[first:last, left:right]
            return pack_pairs(self._in_four_bits(values))
        if kind == 1:
            stored: Tensor = source[first // 2 : -(-last // 2), left:right]
            return stored.contiguous().view(torch.int8)
        halves: Tensor = source[first:last, left // 2 : -(-right // 2)]
        return _turned(halves.contiguous().view(torch.uint8))[:, left % 2 :][:, : right - left]

    def _scales(self) -> Tensor:
        """Return the scales of the whole matrix, [out, groups] float32."""
        groups = self._form.groups_of(self._shape[1])
        if self._has(f"{self._module}.weight_scale_second"):
            return self._floats("weight_scale", 1) * self._floats("weight_scale_second", groups)
        return self._floats("weight_scale", groups)

    def _floats(self, suffix: str, groups: int) -> Tensor:
        source = self._find(f"{self._module}.{suffix}")
        found, out = tuple(source.get_shape()), self._shape[0]
        if math.prod(found) != out * groups:
            raise MissingTensorError(
                f"tensor {self._module}.{suffix} has shape {found}; {out} outputs with {groups} "
                "scales each are needed"
            )
        whole: Tensor = source[:]
        return whole.float().view(out, groups)

    def _in_four_bits(self, values: Tensor) -> Tensor:
        wrong = values[(values < -8) | (values > 7)]
        if len(wrong):
            raise ModelError(
                f"tensor {self._module}.weight has the value {int(wrong[0])}; values of four bits "
                "are from -8 to 7: quantise the model again"
            )
        return values

    def _check(
        self, source: Any, suffix: str, dtypes: tuple[str, ...], wanted: list[tuple[int, int]]
    ) -> tuple[int, int]:
        """Check the type and the shape of a stored tensor; return the shape."""
        if source.get_dtype() not in dtypes:
            raise ModelError(
                f"tensor {self._module}.{suffix} has the type {source.get_dtype()}; values of four "
                f"bits are stored in {' or '.join(dtypes)}: quantise the model again"
            )
        found: tuple[int, int] = tuple(source.get_shape())
        if found not in wanted:
            raise MissingTensorError(
                f"tensor {self._module}.{suffix} has shape {found}; {wanted[0]} or a packed form "
                "of it is needed"
            )
        return found

    def _refuse_offsets(self) -> None:
        for suffix in OFFSETS:
            name = f"{self._module}.{suffix}"
            if self._has(name) and self._find(name)[:].any():
                raise UnsupportedModelError(
                    f"tensor {name} is not zero everywhere: values of four bits with offsets are "
                    "not supported; quantise the model symmetrically"
                )

    def _regrouped(self, scales: Tensor, start: int, stop: int) -> Tensor:
        """Return the scales of the inputs [start, stop); scales after the matrix's end are zero.
        All groups are divided into smaller groups of equal size if the range begins or ends within
        a group, or if the last group is shorter than the others. Each smaller group has the scale
        of its original group.
        """
        if scales.shape[1] == 1:
            return scales
        group = self._form.group
        assert group is not None
        fine = math.gcd(group, start, stop)
        least = group if self._form.quantises_rows else SMALLEST_GROUP
        if fine % least:
            remedy = (
                "quantise the checkpoint with a group size that divides the inputs"
                if (start, stop) == (0, self._shape[1])
                else "choose another parallel.tp, or parallel.ep for experts"
            )
            raise ConfigError(
                f"inputs {start} to {stop} of {self._module} are on one rank; its scales are for "
                f"groups of {group} inputs, which can be divided at multiples of {least} only: "
                f"{remedy}"
            )
        part = scales.repeat_interleave(group // fine, 1)[:, start // fine : stop // fine]
        return pad(part, (0, (stop - start) // fine - part.shape[1]))


def pack_pairs(values: Tensor) -> Tensor:
    """Pack two outputs into each byte, the first output in the low bits.

    Args:
        values: [out, in] int8 between -8 and 7.

    Returns:
        [out / 2, in] int8; if the number of outputs is odd, an output of zeros is added.
    """
    low, high = _two_rows(values)
    return (low & 15) | (high << 4)


def _halves(pairs: Tensor) -> list[Tensor]:
    """Return two tensors: the signed values in the low bits, and the signed values in the high
    bits.
    """
    return [(pairs << 4) >> 4, pairs >> 4]


def _turned(packed: Tensor) -> Tensor:
    """Repack weights of four bits. In ``packed``, each byte contains two neighbouring inputs. In
    the result, each byte contains two neighbouring outputs.

    Args:
        packed: [out, in / 2] uint8, the first input in the low bits.

    Returns:
        [out / 2, in] int8.
    """
    first, second = _two_rows(packed)
    even = (first & 15) | (second << 4)
    odd = (first >> 4) | (second & 0xF0)
    return torch.stack([even, odd], -1).flatten(1).view(torch.int8)


def _two_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors: the rows with even indices, and the rows with odd indices. If the number
    of rows is odd, a row of zeros is added to the second tensor.
    """
    rows = pad(rows, (0, 0, 0, len(rows) % 2))
    return rows[::2], rows[1::2]
