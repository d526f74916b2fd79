"""Finds the safetensors files of a checkpoint, and checks that they are complete.

Only headers are read, so a missing or truncated file is found before anything is started.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

from dist_aclgraph.errors import (
    ONLY_SAFETENSORS,
    OTHER_WEIGHTS,
    ModelError,
    UnsupportedModelError,
)
from dist_aclgraph.shapes.json_files import (
    POINTER,
    check_no_pointer,
    check_regular,
    read_json_object,
)

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
# Matches the name of one of several numbered files, such as model-00001-of-00004.safetensors
_PART = re.compile(r".*?(?P<number>\d+)-of-(?P<count>\d{1,5})\.safetensors")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def check_weight_files(directory: str | Path) -> None:
    """Check by the headers that a checkpoint's weights can be loaded.

    Raises:
        ModelError: a file is missing, cut off, or not a safetensors file; the message names the
            file.
    """
    directory = Path(directory)
    names_by_file: dict[str, list[str]] = {}
    for name, file in tensor_files(directory).items():
        names_by_file.setdefault(file, []).append(name)
    _check_all_exist(directory, sorted(names_by_file))
    for file, names in sorted(names_by_file.items()):
        header = read_header(directory / file)
        if lacking := [name for name in names if name not in header]:
            raise ModelError(
                f"{directory / file} has no tensor {lacking[0]}, though the index names that file; "
                "download both again"
            )


def weight_files(directory: str | Path) -> list[Path]:
    """Return the files that hold a checkpoint's weights.

    Raises:
        ModelError: see ``tensor_files``.
    """
    directory = Path(directory)
    return [directory / name for name in sorted(set(tensor_files(directory).values()))]


def tensor_files(directory: Path) -> dict[str, str]:
    """Return the file name of each tensor. The names come from the index, or from the files if
    there is no index.

    Raises:
        ModelError: there are no weights, or the index or a header cannot be read.
        UnsupportedModelError: the weights have another format.
    """
    index = _file_named(directory, INDEX)
    if index.exists():
        return _read_weight_map(index)
    files = _files_without_index(directory)
    if not files:
        for file in sorted(directory.glob("*")):
            if kind := OTHER_WEIGHTS.get(file.suffix):
                raise UnsupportedModelError(f"{file} is a {kind}; {ONLY_SAFETENSORS}")
        raise ModelError(
            f"{directory} has no weights: neither {SINGLE} nor {INDEX}, nor other files of "
            "safetensors; name a checkpoint with weights by model=PATH, or set weights=dummy"
        )
    found: dict[str, str] = {}
    for file in files:
        for name in read_header(file):
            if name in found:
                raise ModelError(
                    f"{directory} has no {INDEX}, and both {found[name]} and {file.name} have the "
                    f"tensor {name}; keep only the files of one checkpoint"
                )
            found[name] = file.name
    return found


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
            stream.seek(0)
            check_no_pointer(path, stream.read(len(POINTER)))
            stream.seek(8)
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


def _files_without_index(directory: Path) -> list[Path]:
    """Return the files of weights of a checkpoint that has no index.

    Quantisation tools choose their own file names. Some checkpoints have several files, but no
    index. Files named consolidated are copies of the weights in Mistral's own format.

    Raises:
        ModelError: a numbered file, such as model-00002-of-00004.safetensors, is missing.
    """
    single = directory / SINGLE
    if single.exists() or single.is_symlink():
        return [single]
    files = sorted(directory.glob("*.safetensors"))
    files = [file for file in files if not file.name.startswith("consolidated")] or files
    names = {file.name for file in files}
    for file in files:
        if part := _PART.fullmatch(file.name):
            head, tail = file.name[: part.start("number")], file.name[part.end("number") :]
            width = len(part["number"])
            needed = [f"{head}{i:0{width}}{tail}" for i in range(1, int(part["count"]) + 1)]
            _check_all_exist(directory, [name for name in needed if name not in names])
    return files


def _check_all_exist(directory: Path, names: list[str]) -> None:
    """Raise ModelError if one or more of the named files of weights do not exist."""
    missing = [name for name in names if not (directory / name).exists()]
    if len(missing) > 1:
        raise ModelError(
            f"cannot read {directory / missing[0]}: this file and {len(missing) - 1} other files "
            "of weights do not exist; download the checkpoint again"
        )
    if missing:
        check_regular(directory / missing[0])


def _file_named(directory: Path, name: str) -> Path:
    """Return the file with the name ``name``. If this file does not exist, but exactly one file has
    another prefix in place of ``model``, return that file.
    """
    wanted = directory / name
    if wanted.exists():
        return wanted
    others = list(directory.glob("*" + name.removeprefix("model")))
    return others[0] if len(others) == 1 else wanted
