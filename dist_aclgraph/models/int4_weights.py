"""Matrices with values of four bits, as ModelSlim and compressed-tensors store them.

Everything here runs on the host, because an NPU has no fast operators on bits. A value is between
-8 and 7. The stored forms of an [out, in] matrix, which the shapes tell apart:

- ``weight_packed`` [out, in / 8] int32, eight inputs each, the first input in the lowest bits, and
  8 added to the values (compressed-tensors, pack-quantized);
- ``weight`` [out, in] int8, one value each (compressed-tensors, int-quantized; older ModelSlim);
- ``weight`` [out / 2, in] int8, two outputs each, the first output in the low bits (ModelSlim);
- ``weight`` [out, in / 2] int8, two inputs each (ModelSlim, W4A16 without groups).

Scales are ``weight_scale``, [out, groups] in any shape of this size. ModelSlim's W4A8 with groups
multiplies ``weight_scale`` [out, 1] by ``weight_scale_second`` [out, groups].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dist_aclgraph.errors import ConfigError, MissingTensorError, UnsupportedModelError
from dist_aclgraph.shapes.int4_formats import SMALLEST_GROUP, Int4Format

OFFSETS = ("weight_offset", "weight_offset_second", "weight_zero_point")


@dataclass(frozen=True)
class Int4Matrix:
    """A part of a matrix, on the host.

    Attributes:
        values: [out, in] int8, between -8 and 7.
        scales: [out, groups] float32; all groups have the same number of inputs.
    """

    values: Tensor
    scales: Tensor

    def floats(self) -> Tensor:
        """Return the matrix in float32, [out, in]."""
        out, num_inputs = self.values.shape
        grouped = self.values.float().view(out, self.scales.shape[1], -1)
        return (grouped * self.scales[:, :, None]).view(out, num_inputs)

    def rearranged(self, rearrange: Callable[[Tensor], Tensor]) -> Int4Matrix:
        """Return the matrix with its outputs in another order.

        Args:
            rearrange: changes the order of columns, [n, out] -> [n, out].
        """
        values, scales = (rearrange(tensor.t()).t() for tensor in (self.values, self.scales))
        return Int4Matrix(values.contiguous(), scales)

    def in_pairs(self, *, has_sums: bool) -> Int4Pairs:
        """Return the matrix with two outputs in each byte."""
        sums = 8 * self.floats().sum(1) if has_sums else None
        return Int4Pairs(pack_pairs(self.values), self.scales.t(), sums)


@dataclass(frozen=True)
class Int4Pairs:
    """A part of a matrix, with two outputs in each byte.

    Attributes:
        pairs: [out / 2, in] int8, the first output in the low bits.
        scales: [groups, out] float32.
        sums: [out] float32: 8 times the sum of each output's weights; None if the product does not
            need them.
    """

    pairs: Tensor
    scales: Tensor
    sums: Tensor | None


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
        """Describe a matrix; nothing is read.

        Args:
            module: name of the matrix without ``.weight``.
            shape: [out, in].
            find: returns the tensor of a name, as safetensors' slices.
            has: whether there is a tensor of this name.
        """
        self._module, self._shape, self._form = module, shape, form
        self._find, self._has = find, has

    def read(self, dim: int, start: int, stop: int) -> Int4Matrix:
        """Return ``[start, stop)`` of ``dim``; values after the matrix's end are zero.

        Raises:
            ConfigError: a part of the inputs does not begin or end where a group does.
            MissingTensorError: a tensor is missing, or has another shape.
            UnsupportedModelError: the values have offsets.
        """
        self._refuse_offsets()
        end = self._shape[dim]
        first, last = min(start, end), min(stop, end)
        missing, scales = stop - start - (last - first), self._scales()
        if dim == 0:
            below = (0, 0, 0, missing)
            values = pad(self._values(slice(first, last), slice(None)), below)
            return Int4Matrix(values, pad(scales[first:last], below))
        values = pad(self._values(slice(None), slice(first, last)), (0, missing))
        return Int4Matrix(values, self._regrouped(scales, start, stop))

    def _values(self, rows: slice, columns: slice) -> Tensor:
        out, num_inputs = self._shape
        if self._has(f"{self._module}.weight_packed"):
            source = self._find(f"{self._module}.weight_packed")
            self._check_shape(source, "weight_packed", [(out, -(-num_inputs // 8))])
            words: Tensor = source[rows]
            return (_nibbles(words.contiguous().view(torch.uint8))[:, :num_inputs] - 8)[:, columns]
        source = self._find(f"{self._module}.weight")
        kinds = [(out, num_inputs), (out // 2, num_inputs), (out, num_inputs // 2)]
        kind = kinds.index(self._check_shape(source, "weight", kinds))
        if kind == 0:
            values: Tensor = source[rows, columns]
            return values.contiguous()
        if kind == 1:
            first, last = rows.start or 0, out if rows.stop is None else rows.stop
            pairs: Tensor = source[first // 2 : -(-last // 2), columns]
            both = _nibbles(pairs.t().contiguous().view(torch.uint8)).t()
            return _signed(both[first % 2 :][: last - first])
        halves: Tensor = source[rows]
        return _signed(_nibbles(halves.contiguous().view(torch.uint8))[:, columns])

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

    def _check_shape(
        self, source: Any, suffix: str, wanted: list[tuple[int, int]]
    ) -> tuple[int, int]:
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
        """Return the scales of inputs [start, stop); zeros after the matrix's end. If groups cross
        the part's limits, they are divided into smaller groups with equal scales.
        """
        if scales.shape[1] == 1:
            return scales
        group = self._form.group
        assert group is not None
        fine = math.gcd(group, start, stop)
        least = group if self._form.quantises_rows else SMALLEST_GROUP
        if fine % least:
            raise ConfigError(
                f"inputs {start} to {stop} of {self._module} are on one rank; its scales are for "
                f"groups of {group} inputs, which can be divided at multiples of {least} only: "
                "choose another parallel.tp, or parallel.ep for experts"
            )
        part = scales.repeat_interleave(group // fine, 1)[:, start // fine : stop // fine]
        return pad(part, (0, (stop - start) // fine - part.shape[1]))


def pack_pairs(values: Tensor) -> Tensor:
    """Return two outputs in each byte, the first one in the low bits.

    Args:
        values: [out, ...] int8 between -8 and 7; ``out`` is even.

    Returns:
        [out / 2, ...] int8.
    """
    low, high = (values[i::2].view(torch.uint8) for i in (0, 1))
    return ((low & 15) | (high << 4)).view(torch.int8)


def _nibbles(packed: Tensor) -> Tensor:
    """Return the two halves of each byte, the low one first: [n, bytes] -> [n, 2 * bytes] int8."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1).view(torch.int8)


def _signed(nibbles: Tensor) -> Tensor:
    """Return the values of bits in two's complement: 8 to 15 become -8 to -1."""
    return (nibbles ^ 8) - 8
