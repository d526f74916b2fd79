"""Reads a checkpoint's safetensors files slice by slice. Only the slices that a rank needs are
read.

Files are mapped into memory, so the ranks of a node share the pages, and each rank touches only its
slices. A slice is converted (to another dtype, to int8, or to floats) on the device. Four-bit
values, FP8 values and MXFP4 values are converted on the host, because not every chip supports FP8.
Quantised weights are multiplied by their scales while they are read. The exceptions are matrices
for products in int8, and matrices for products with four-bit weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dist_aclgraph.errors import (
    ConfigError,
    MissingTensorError,
    ModelError,
    UnsupportedModelError,
)
from dist_aclgraph.models import block_scales, int8_weights, mxfp4
from dist_aclgraph.models.int4_weights import PackedInt4Matrix, StoredInt4
from dist_aclgraph.models.int8_weights import Matrix
from dist_aclgraph.shapes.int4_formats import NO_INT4, Int4Format, Int4Formats
from dist_aclgraph.shapes.model_spec import RowRange, WeightNames
from dist_aclgraph.shapes.weight_files import is_headless, tensor_files

CPU = torch.device("cpu")
# Bytes of a piece. Smaller pieces would need more calls. Larger pieces would need more device
# memory, and on an emulated device, they would not fit in the CPU's caches.
PIECE_BYTES = 4 << 20
USUAL_NAMES = WeightNames()
# Safetensors' names of the types whose values need scales, and of the types that need no scales.
SCALED, FLOATS = ("F8_E4M3", "I8"), ("BF16", "F16", "F32", "F64")


class Checkpoint:
    """The tensors of a directory of safetensors files.

    The object owns the open files, and one buffer. Tensors are read piece by piece through this
    buffer, because a new buffer for each piece would need new memory pages. The object knows names
    and shapes, but nothing about layers or ranks.

    Attributes:
        dtype: type to which all floats are converted when they are read. The files can store
            another type.
        device: device to which tensors are read.
        quantises: whether the weights of matrix products are converted to int8.
        has_head: whether the files were written for a model with an output head. In files without a
            head, such as those of an embedding model, names do not begin with ``model.``.
    """

    def __init__(
        self,
        directory: str | Path,
        dtype: torch.dtype,
        *,
        device: torch.device = CPU,
        quantises: bool = False,
        names: WeightNames = USUAL_NAMES,
        int4: Int4Formats = NO_INT4,
    ) -> None:
        """Open a checkpoint.

        Args:
            quantises: whether the weights of matrix products are converted to int8.
            names: maps the usual names of tensors, which callers use, to the names in the files.
            int4: the formats of matrices whose values have four bits.
        """
        self.dtype = dtype
        self.device = device
        self._directory = Path(directory)
        self.quantises = quantises
        self._names = names
        self._int4_formats = int4
        self._file_of = tensor_files(self._directory)
        self.has_head = not is_headless(self._file_of)
        self._open: dict[str, Any] = {}
        self._read_names: set[str] = set()  # stored names of all tensors that were read
        self._room = torch.empty(0, dtype=torch.uint8)

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._file_of

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the stored shape of a tensor.

        Raises:
            MissingTensorError: there is no such tensor.
        """
        return tuple(self._find(name).get_shape())

    def read_float32(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a whole tensor in float32, even if ``self.dtype`` is another type.

        Raises:
            MissingTensorError: see ``read``.
        """
        return self._floats(name, shape, 0, 0, shape[0], torch.float32)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a whole tensor in ``dtype``.

        Raises:
            MissingTensorError: the tensor is missing, or has another shape.
            UnsupportedModelError: the stored type is neither a float nor a supported quantised
                type.
        """
        return self._floats(name, shape, 0, 0, shape[0], self.dtype)

    def read_part(
        self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int
    ) -> Tensor:
        """Return the range ``[start, stop)`` of a tensor's dimension ``dim``. Elements after the
        tensor's end are zero.

        Raises:
            MissingTensorError: see ``read``.
        """
        return _padded(self._floats(name, shape, dim, start, stop, self.dtype), dim, stop - start)

    def read_member(
        self,
        name: str,
        shape: tuple[int, ...],
        member: int,
        dim: int,
        start: int,
        stop: int,
        *,
        has_blocks: bool = False,
    ) -> Tensor:
        """Return a part of a member, which is one tensor in a stack of tensors. The part is the
        range ``[start, stop)`` of the member's dimension ``dim``. Elements after the member's end
        are zero.

        Args:
            shape: shape of the stack; the first dimension is the number of members.
            dim: dimension of the member.
            has_blocks: whether members are [out, in] matrices, which may be stored in FP8. If
                false, members are vectors, or [in, out] matrices, which may be stored in MXFP4.

        Raises:
            MissingTensorError, UnsupportedModelError: see ``read``.
        """
        if name + mxfp4.BLOCKS in self:
            floats = self._mxfp4_member(name, shape, member, dim, start, stop)
            return _padded(floats.to(self.device), dim, stop - start)
        where = [slice(member, member + 1), *([slice(None)] * (len(shape) - 1))]
        where[dim + 1] = slice(start, min(stop, shape[dim + 1]))
        source = self._slice(name, shape)
        part: Tensor = source[tuple(where)][0].contiguous()
        if has_blocks and part.dtype == torch.float8_e4m3fn:
            blocks = block_scales.scales_shape(shape[1:])
            stack = self._slice(name + block_scales.SUFFIX, (shape[0], *blocks))
            scales = stack[member : member + 1][0].float()
            part = block_scales.dequantise(part, scales, _first(dim, start), self.dtype)
        else:
            self._check_floats(name, source)
        return _padded(part.to(self.device).to(self.dtype), dim, stop - start)

    def _mxfp4_member(
        self, name: str, shape: tuple[int, ...], member: int, dim: int, start: int, stop: int
    ) -> Tensor:
        """Return a part of an [in, out] matrix that is stored in MXFP4 as [out, in]; see
        ``read_member``.
        """
        count, num_in, num_out = shape
        num_groups = -(-num_in // mxfp4.GROUP)
        values, powers = (
            self._slice(name + end, (count, num_out, num_groups, *rest))
            for end, rest in ((mxfp4.BLOCKS, (mxfp4.GROUP // 2,)), (mxfp4.SCALES, ()))
        )
        for source in (values, powers):
            self._check_type(name, source, mxfp4.STORED)
        if dim == 1:
            rows, groups, first = slice(start, stop), slice(None), 0
        else:
            rows, groups = slice(None), slice(start // mxfp4.GROUP, -(-stop // mxfp4.GROUP))
            first = start % mxfp4.GROUP
        where = slice(member, member + 1), rows, groups
        part = mxfp4.dequantise(values[where][0], powers[where][0], self.dtype).t()
        return part if dim == 1 else part[first : first + min(stop, num_in) - start]

    def write_part(
        self, out: Tensor, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int
    ) -> None:
        """Write to ``out`` the result that ``read_part`` would return.

        The part is sent piece by piece, so the device needs memory only for ``out`` and one piece.

        Args:
            out: tensor on the device, with the part's shape and any strides.

        Raises:
            MissingTensorError: see ``read``.
        """
        if self._int4_of(name) or self._slice(name, shape).get_dtype() in SCALED:
            out.copy_(self.read_part(name, shape, dim, start, stop).to(out.device))
            return
        source = self._slice(name, shape)
        self._check_floats(name, source)
        first, last = (start, min(stop, shape[0])) if dim == 0 else (0, shape[0])
        columns = slice(start, stop) if dim == 1 else slice(None)
        there = out.narrow(dim, 0, max(0, min(stop, shape[dim]) - start))
        step = max(1, PIECE_BYTES // max(1, there[:1].nbytes))
        for row in range(first, last, step):
            piece = self._gathered(source[row : min(row + step, last), columns])
            rows = there[row - first : row - first + step]
            rows.copy_(piece.to(out.device).to(out.dtype))
        if missing := out.shape[dim] - there.shape[dim]:
            out.narrow(dim, there.shape[dim], missing).zero_()

    def _gathered(self, piece: Tensor) -> Tensor:
        """Return a contiguous copy of a piece. The copy is in a buffer that the next call
        overwrites.
        """
        if piece.is_contiguous():
            return piece
        if self._room.numel() < piece.nbytes:
            self._room = torch.empty(max(PIECE_BYTES, piece.nbytes), dtype=torch.uint8)
        gathered = self._room[: piece.nbytes].view(piece.dtype).view(piece.shape)
        return gathered.copy_(piece)

    def form_of(self, name: str, shape: tuple[int, int]) -> torch.dtype | Int4Format:
        """Return the form in which products use a matrix: ``dtype``, int8, or four bits.

        Raises:
            MissingTensorError: see ``read``.
        """
        if (form := self._int4_of(name)) is not None:
            return form
        is_int8 = self.quantises or self._slice(name, shape).get_dtype() == "I8"
        return torch.int8 if is_int8 else self.dtype

    def read_int4(
        self,
        name: str,
        shape: tuple[int, int],
        dim: int,
        start: int,
        stop: int,
        rearrange: Callable[[Tensor], Tensor] | None,
    ) -> PackedInt4Matrix:
        """Return the range ``[start, stop)`` of the dimension ``dim`` of an [out, in] matrix of
        four bits, on the host.

        Args:
            rearrange: changes the order of outputs, [..., out] -> [..., out]; None keeps the order.

        Raises:
            ConfigError: ``dtype`` is float32, or the range of inputs begins or ends within a group
                of inputs with the same scale.
            MissingTensorError: see ``read``.
            UnsupportedModelError: the values have offsets.
        """
        self._refuse_float32("four-bit", name)
        form = self._int4_of(name)
        assert form is not None
        matrix = self._stored_int4(name, shape, form).read(dim, start, stop)
        if rearrange is not None:
            matrix = matrix.rearranged(rearrange)
        return matrix.with_sums() if form.quantises_rows else matrix

    def read_matrix(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int
    ) -> Matrix:
        """Return the range ``[start, stop)`` of the dimension ``dim`` of an [out, in] weight, as
        ``read_part`` does.

        The result is int8 if the checkpoint stores int8, or if ``quantises`` is true. The scale of
        an output depends on all of its inputs, so inputs outside the range are also read.

        Raises:
            ConfigError: the weight is int8 and ``dtype`` is float32. No operator accepts this
                combination.
            MissingTensorError: see ``read``.
            UnsupportedModelError: the int8 weight has offsets.
        """
        if self.form_of(name, shape) != torch.int8:
            return Matrix(self.read_part(name, shape, dim, start, stop).t())
        self._refuse_float32("int8", name)
        is_int8 = self._slice(name, shape).get_dtype() == "I8"
        first, last = (start, stop) if dim == 0 else (0, shape[0])
        if is_int8:
            weight = self._cut(name, shape, dim, start, stop).to(self.device)
            scale = self._scales(name, shape[0])[first:last]
        else:
            floats = self._floats(name, shape, 0, first, last, torch.float32)
            weight, scale = int8_weights.quantise(floats)
            weight = weight if dim == 0 else weight[:, start:stop]
        weight, scale = _padded(weight, dim, stop - start), _padded(scale, 0, last - first)
        return Matrix(weight.t(), scale.t())

    def _floats(
        self,
        name: str,
        shape: tuple[int, ...],
        dim: int,
        start: int,
        stop: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the range ``[start, stop)`` of the dimension ``dim``, at most up to the tensor's
        end. The values are multiplied by their scales.
        """
        if (form := self._int4_of(name)) is not None:
            stored = self._stored_int4(name, (shape[0], shape[1]), form)
            floats = stored.read_floats(dim, min(start, shape[dim]), min(stop, shape[dim]))
            return floats.to(dtype).to(self.device)
        part = self._cut(name, shape, dim, start, stop)
        if part.dtype == torch.float8_e4m3fn:
            scales = self._slice(name + block_scales.SUFFIX, block_scales.scales_shape(shape))[
                :
            ].float()
            return block_scales.dequantise(part, scales, _first(dim, start), dtype).to(self.device)
        part = part.to(self.device)
        if part.dtype == torch.int8:
            scale = self._scales(name, shape[0])
            return int8_weights.dequantise(part, scale[start:stop] if dim == 0 else scale, dtype)
        self._check_floats(name, self._find(name))
        return part.to(dtype)

    def _check_floats(self, name: str, source: Any) -> None:
        """Raise an error if the type of the stored values is not in ``FLOATS``."""
        self._check_type(name, source, FLOATS)

    def _check_type(self, name: str, source: Any, known: Sequence[str]) -> None:
        if (found := source.get_dtype()) not in known:
            raise UnsupportedModelError(
                f"tensor {name} in {self._directory} has the type {found}, which is not supported "
                f"here; supported are {', '.join(known)}: use a checkpoint with this tensor in "
                "bfloat16"
            )

    def _int4_of(self, name: str) -> Int4Format | None:
        form = self._int4_formats.of(self._stored_name(name))
        if form is None:
            return None
        # A format's pattern of names can also match embeddings and norms. A tensor without scales
        # is not a four-bit matrix.
        module = name.removesuffix(".weight")
        has_scales = any(f"{module}.{part}" in self for part in ("weight_scale", "weight_packed"))
        return form if has_scales else None

    def _stored_int4(self, name: str, shape: tuple[int, int], form: Int4Format) -> StoredInt4:
        module = name.removesuffix(".weight")
        return StoredInt4(module, shape, form, self._find, self.__contains__)

    def _refuse_float32(self, what: str, name: str) -> None:
        if self.dtype == torch.float32:
            raise ConfigError(
                f"dtype is float32; products of {what} weights, such as {name} in "
                f"{self._directory}, give only float16 or bfloat16: set dtype=bfloat16"
            )

    def _cut(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        """Return the range ``[start, stop)`` of the dimension ``dim``, at most up to the tensor's
        end, as stored, on the host.
        """
        source = self._slice(name, shape)
        stop = min(stop, shape[dim])
        start = min(start, stop)
        part: Tensor = source[start:stop] if dim == 0 else source[:, start:stop]
        return part.contiguous()

    def _scales(self, name: str, num_outputs: int) -> Tensor:
        """Return the scales of an int8 weight, [num_outputs, 1] float32."""
        offset = name + int8_weights.OFFSET
        if offset in self and self._find(offset)[:].any():
            raise UnsupportedModelError(
                f"tensor {offset} in {self._directory} is not zero everywhere: int8 weights with "
                "offsets are not supported; quantise the model symmetrically"
            )
        scale = name + int8_weights.SCALE
        found = tuple(self._find(scale).get_shape())
        shape = (num_outputs,) if len(found) == 1 else (num_outputs, 1)
        whole: Tensor = self._slice(scale, shape)[:]
        return whole.float().view(num_outputs, 1).to(self.device)

    def _slice(self, name: str, shape: tuple[int, ...]) -> Any:
        source = self._find(name)
        found = tuple(source.get_shape())
        if found != shape:
            raise MissingTensorError(
                f"tensor {name} in {self._directory} has shape {found}; "
                f"config.json asks for {shape}"
            )
        return source

    def _stored_name(self, name: str) -> str:
        name = self._names.stored(name)
        return name if self.has_head else name.removeprefix("model.")

    def count_ignored(self) -> int:
        """Return how many tensors in the files belong to parts of the model that are not loaded,
        such as an image encoder.
        """
        return sum(name.startswith(self._names.ignored) for name in self._file_of)

    def refuse_unread_biases(self) -> None:
        """Call this after all weights were read. This method raises an error if the checkpoint
        contains a bias for one of these weights, and this bias was not read.

        Some tools add biases that the model does not have. Such a bias is ignored if all of its
        values are zero. Biases of weights that this rank did not read, such as the weights of other
        ranks' experts, are not checked.

        Raises:
            UnsupportedModelError: a bias that was not read has a value that is not zero.
        """
        modules = {name.rpartition(".weight")[0] for name in self._read_names}
        for name in sorted(self._file_of.keys() - self._read_names):
            module = name.removesuffix(".bias")
            if module == name or module not in modules:
                continue
            if self._file(self._file_of[name]).get_slice(name)[:].any():
                raise UnsupportedModelError(
                    f"tensor {name} in {self._directory} is not zero everywhere, and the model has "
                    "no such bias: quantise it again without anti_method m4 (ModelSlim), or "
                    "without another method that adds biases"
                )

    def _find(self, name: str) -> Any:
        rows = self._names.range_of(name)
        source = self._find_stored(self._stored_name(name))
        return source if rows is None else _Rows(source, rows)

    def _find_stored(self, name: str) -> Any:
        self._read_names.add(name)
        if name not in self._file_of:
            raise MissingTensorError(f"{self._directory} has no tensor {name}")
        try:
            return self._file(self._file_of[name]).get_slice(name)
        except SafetensorError as e:
            file = self._directory / self._file_of[name]
            raise MissingTensorError(
                f"{file} has no tensor {name}, though the index names that file"
            ) from e

    def _file(self, file_name: str) -> Any:
        if file_name not in self._open:
            try:
                self._open[file_name] = safe_open(self._directory / file_name, framework="pt")
            except (OSError, SafetensorError) as e:
                raise ModelError(f"cannot read {self._directory / file_name}: {e}") from e
        return self._open[file_name]


class _Rows:
    """Some rows of a stored tensor. This class has the methods of safetensors' slice objects."""

    def __init__(self, source: Any, rows: RowRange) -> None:
        self._source, self._rows = source, rows

    def get_dtype(self) -> str:
        return str(self._source.get_dtype())

    def get_shape(self) -> list[int]:
        """Return the shape of these rows. If the stored tensor has a wrong number of rows, return
        the tensor's shape.
        """
        stored = list(self._source.get_shape())
        return [self._rows.count, *stored[1:]] if stored[:1] == [self._rows.total] else stored

    def __getitem__(self, where: slice | tuple[slice, ...]) -> Tensor:
        rows, *rest = where if isinstance(where, tuple) else (where,)
        start, stop, _ = rows.indices(self._rows.count)
        moved = slice(self._rows.first + start, self._rows.first + max(start, stop))
        part: Tensor = self._source[(moved, *rest)]
        return part


def _first(dim: int, start: int) -> tuple[int, int]:
    """Return row and column at which a part of a matrix begins."""
    return (start, 0) if dim == 0 else (0, start)


def _padded(part: Tensor, dim: int, length: int) -> Tensor:
    """Return the part, followed by as many zeros as needed for the size ``length`` in the dimension
    ``dim``.
    """
    missing = length - part.shape[dim]
    if missing == 0:
        return part
    padding = list(part.shape)
    padding[dim] = missing
    return torch.cat([part, torch.zeros(padding, dtype=part.dtype, device=part.device)], dim)
