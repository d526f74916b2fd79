"""Finds the safetensors files of a checkpoint, and checks that they are complete.

Only headers are read, so a missing or truncated file is found before anything is started.
"""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

from dist_aclgraph.errors import (
    ONLY_SAFETENSORS,
    OTHER_WEIGHTS,
    ModelError,
    UnsupportedModelError,
)
from dist_aclgraph.shapes.json_files import check_regular, read_json_object

MAX_HEADER_BYTES = 100_000_000  # bytes; the limit that the format itself has
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def check_weight_files(directory: str | Path) -> None:
    """Check by the headers that a checkpoint's weights can be loaded.

    Raises:
        ModelError: a file is missing, cut off or no safetensors file; the message names the file.
    """
    for file in weight_files(directory):
        read_header(file)


def weight_files(directory: str | Path) -> list[Path]:
    """Return the files that hold a checkpoint's weights.

    Raises:
        ModelError: as ``tensor_files``.
    """
    directory = Path(directory)
    return [directory / name for name in sorted(set(tensor_files(directory).values()))]


def tensor_files(directory: Path) -> dict[str, str]:
    """Return the file name of each tensor: from the index, or the only file if there is no index.

    Raises:
        ModelError: there are no weights, or the index or a header cannot be read.
        UnsupportedModelError: the weights have another format.
    """
    index = _file_named(directory, INDEX)
    if index.exists():
        return _read_weight_map(index)
    single = _file_named(directory, SINGLE)
    if not single.exists():
        for file in sorted(directory.glob("*")):
            if kind := OTHER_WEIGHTS.get(file.suffix):
                raise UnsupportedModelError(f"{file} is a {kind}; {ONLY_SAFETENSORS}")
        raise ModelError(
            f"{directory} has no weights: neither {SINGLE} nor {INDEX}, nor a single file with one "
            "of these suffixes; name a checkpoint with weights by model=PATH, or set weights=dummy"
        )
    return dict.fromkeys(read_header(single), single.name)


def is_headless(names: Container[str]) -> bool:
    """Return whether a checkpoint with these tensors has a decoder but no output head."""
    return "embed_tokens.weight" in names


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: tensors by name, with dtype, shape and offsets.

    Raises:
        ModelError: the file is not a safetensors file, or is cut off.
    """
    check_regular(path)
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            num_bytes = path.stat().st_size
            if not 2 <= size <= min(MAX_HEADER_BYTES, num_bytes - 8):
                raise ModelError(f"{path} is no safetensors file, or is cut off in its header")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        ends = [tensor["data_offsets"][1] for tensor in header.values()]
        missing = max(ends, default=0) - (num_bytes - 8 - size)
    except OSError as e:
        raise ModelError(f"cannot read {path}: {e.strerror}") from e
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as e:
        raise ModelError(f"{path} is no safetensors file: its header cannot be read") from e
    if missing > 0:
        raise ModelError(f"{path} is cut off: {missing} bytes are missing; download it again")
    return dict(header)


def _read_weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor; all files must be inside the directory.

    Raises:
        ModelError: the index cannot be read, or names a file outside the directory.
    """
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} is not an index of safetensors files: it has no weight_map")
    for file_name in weight_map.values():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelError(f"{index} names a file outside the directory: {file_name!r:.200}")
    return weight_map


def _file_named(directory: Path, name: str) -> Path:
    """Return the file with the name ``name``. If there is no such file, return the only file whose
    name has the same ending.

    Quantisation tools choose their own file names.
    """
    wanted = directory / name
    if wanted.exists():
        return wanted
    others = list(directory.glob("*" + name.removeprefix("model")))
    return others[0] if len(others) == 1 else wanted
