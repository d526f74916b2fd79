"""Reading a checkpoint slice by slice: safetensors only, and no more than a rank needs.

Weights in FP8 are multiplied by their blocks' scales while they are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dist_aclgraph.errors import MissingTensorError, ModelError
from dist_aclgraph.models import block_scales

Progress = Callable[[int, int], None]  # tensors read, tensors in all


class Checkpoint:
    """The tensors of a directory of safetensors files.

    Owns the open files. Knows names and shapes; nothing about layers or ranks.
    """

    def __init__(self, directory: str | Path, dtype: torch.dtype) -> None:
        self._directory = Path(directory)
        self._dtype = dtype
        self._file_of = self._index()
        self._open: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read_float32(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a whole unquantised tensor, in float32 whatever the dtype of the others.

        Raises:
            MissingTensorError: as ``read``.
        """
        whole: Tensor = self._slice(name, shape)[:]
        return whole.float()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a whole tensor in the dtype of the checkpoint object.

        Raises:
            MissingTensorError: no such tensor, or one of another shape.
        """
        whole: Tensor = self._slice(name, shape)[:]
        return self._in_dtype(whole, name, shape, (0, 0))

    def read_part(
        self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int
    ) -> Tensor:
        """Return ``[start, stop)`` of ``dim``; what lies beyond the tensor's end is zero.

        Raises:
            MissingTensorError: as ``read``.
        """
        source = self._slice(name, shape)
        end = min(stop, shape[dim])
        start_in = min(start, end)
        part: Tensor = source[start_in:end] if dim == 0 else source[:, start_in:end]
        part = self._in_dtype(part, name, shape, (start_in, 0) if dim == 0 else (0, start_in))
        missing = (stop - start) - (end - start_in)
        if missing == 0:
            return part
        padding = list(part.shape)
        padding[dim] = missing
        return torch.cat([part, torch.zeros(padding, dtype=self._dtype)], dim)

    def _in_dtype(
        self, part: Tensor, name: str, shape: tuple[int, ...], first: tuple[int, int]
    ) -> Tensor:
        if part.dtype != torch.float8_e4m3fn:
            return part.to(self._dtype)
        scales = self._slice(name + block_scales.SUFFIX, block_scales.scales_shape(shape))[:]
        return block_scales.dequantise(part, scales, first, self._dtype)

    def _slice(self, name: str, shape: tuple[int, ...]) -> Any:
        if name not in self._file_of:
            raise MissingTensorError(f"{self._directory} has no tensor {name}")
        try:
            source = self._file(self._file_of[name]).get_slice(name)
        except SafetensorError as e:
            file = self._directory / self._file_of[name]
            raise MissingTensorError(f"{file} has no tensor {name}, though the index says") from e
        found = tuple(source.get_shape())
        if found != shape:
            raise MissingTensorError(
                f"tensor {name} in {self._directory} has shape {found}; "
                f"config.json asks for {shape}"
            )
        return source

    def _file(self, file_name: str) -> Any:
        if file_name not in self._open:
            try:
                self._open[file_name] = safe_open(self._directory / file_name, framework="pt")
            except (OSError, SafetensorError) as e:
                raise ModelError(f"cannot read {self._directory / file_name}: {e}") from e
        return self._open[file_name]

    def _index(self) -> dict[str, str]:
        """Map every tensor to its file; names in the index must stay inside the directory."""
        index = self._directory / "model.safetensors.index.json"
        if index.is_file():
            file_of = _read_weight_map(index)
            for file_name in set(file_of.values()):
                if Path(file_name).name != file_name:
                    raise ModelError(f"{index} names a file outside the directory: {file_name!r}")
            return file_of
        single = self._directory / "model.safetensors"
        if not single.is_file():
            raise ModelError(
                f"{self._directory} has neither model.safetensors nor model.safetensors.index.json"
            )
        try:
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single.name)
        except (OSError, SafetensorError) as e:
            raise ModelError(f"cannot read {single}: {e}") from e


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file_name) for name, file_name in weight_map.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        raise ModelError(f"{index} is not an index of safetensors files: {e!r}") from e
