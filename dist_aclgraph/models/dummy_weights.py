"""Weights without files: a checkpoint of zeros, of the shapes that config.json implies.

Answers mean nothing; steps take the same time as with weights. On the emulated NPU the zeros count
as device memory, but take none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dist_aclgraph.models.int8_weights import Matrix


class DummyCheckpoint:
    """Has every tensor that is asked for, zeros of its shape; called as ``Checkpoint``."""

    def __init__(self, dtype: torch.dtype, *, device: torch.device, quantises: bool) -> None:
        self.dtype = dtype
        self.device = device
        self._quantises = quantises

    def read_float32(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a whole tensor in float32."""
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a whole tensor in the dtype of the checkpoint object."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def read_part(
        self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int
    ) -> Tensor:
        """Return ``[start, stop)`` of ``dim``."""
        return self.read(name, _cut(shape, dim, start, stop))

    def write_part(
        self, out: Tensor, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int
    ) -> None:
        """Make ``out`` zero."""
        out.zero_()

    def gives_int8(self, name: str, shape: tuple[int, int]) -> bool:
        """Return whether ``read_matrix`` gives int8."""
        return self._quantises

    def read_matrix(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int
    ) -> Matrix:
        """Return ``[start, stop)`` of ``dim`` of an [out, in] weight; int8 where it quantises."""
        part = _cut(shape, dim, start, stop)
        if not self._quantises:
            return Matrix(self.read(name, part).t())
        weight = torch.zeros(part, dtype=torch.int8, device=self.device)
        return Matrix(weight.t(), self.read_float32(name, (part[0], 1)).t())


def _cut(shape: tuple[int, ...], dim: int, start: int, stop: int) -> tuple[int, ...]:
    return (*shape[:dim], stop - start, *shape[dim + 1 :])
