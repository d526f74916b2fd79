"""Weights without files: a checkpoint whose tensors are zeros. Their shapes follow from
config.json.

The model's answers are meaningless, but steps take the same time as with real weights. In the
emulated NPU, the zeros occupy device memory, but no memory of the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dist_aclgraph.errors import MissingTensorError
from dist_aclgraph.models.checkpoint import USUAL_NAMES
from dist_aclgraph.models.int4_weights import PackedInt4Matrix
from dist_aclgraph.models.int8_weights import Matrix
from dist_aclgraph.shapes.int4_formats import NO_INT4, Int4Format, Int4Formats
from dist_aclgraph.shapes.model_spec import WeightNames


class DummyCheckpoint:
    """Has the interface of ``Checkpoint``; returns zeros of the requested shape for every name."""

    has_head = True

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        device: torch.device,
        quantises: bool,
        names: WeightNames = USUAL_NAMES,
        int4: Int4Formats = NO_INT4,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.quantises = quantises
        self._names = names
        self._int4_formats = int4

    def __contains__(self, name: str) -> bool:
        return False  # no optional tensor exists

    def shape_of(self, name: str) -> tuple[int, ...]:
        raise MissingTensorError(f"tensor {name} has no stored shape")

    def read_float32(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def read_part(
        self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int
    ) -> Tensor:
        return self.read(name, _cut(shape, dim, start, stop))

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
        return self.read(name, _cut(shape[1:], dim, start, stop))

    def write_part(
        self, out: Tensor, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int
    ) -> None:
        """Fill ``out`` with zeros."""
        out.zero_()

    def refuse_unread_biases(self) -> None:
        """Does nothing, because no bias is stored."""

    def form_of(self, name: str, shape: tuple[int, int]) -> torch.dtype | Int4Format:
        stored = self._int4_formats.of(self._names.stored(name))
        return stored or (torch.int8 if self.quantises else self.dtype)

    def read_int4(
        self,
        name: str,
        shape: tuple[int, int],
        dim: int,
        start: int,
        stop: int,
        rearrange: Callable[[Tensor], Tensor] | None,
    ) -> PackedInt4Matrix:
        form = self.form_of(name, shape)
        assert isinstance(form, Int4Format)
        out, num_inputs = _cut(shape, dim, start, stop)
        return PackedInt4Matrix(
            torch.zeros(out // 2, num_inputs, dtype=torch.int8, device=self.device),
            torch.zeros(out, form.groups_of(num_inputs)),
            torch.zeros(out) if form.quantises_rows else None,
        )

    def read_matrix(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int
    ) -> Matrix:
        """Return the range ``[start, stop)`` of the dimension ``dim`` of an [out, in] weight.

        The result is int8 if ``quantises`` is true.
        """
        part = _cut(shape, dim, start, stop)
        if not self.quantises:
            return Matrix(self.read(name, part).t())
        weight = torch.zeros(part, dtype=torch.int8, device=self.device)
        return Matrix(weight.t(), self.read_float32(name, (part[0], 1)).t())


def _cut(shape: tuple[int, ...], dim: int, start: int, stop: int) -> tuple[int, ...]:
    return (*shape[:dim], stop - start, *shape[dim + 1 :])
