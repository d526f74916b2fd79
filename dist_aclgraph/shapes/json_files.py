"""Reads JSON files of a checkpoint, up to a maximum size. Each error message is one sentence."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from dist_aclgraph.errors import ModelError

# The beginning of the file that Git stores in place of a large file.
POINTER = "version https://git-lfs"
MAX_JSON_BYTES = 64 << 20  # large enough for an index of a million tensors


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file of a checkpoint.

    Raises:
        ModelError: the file is not a regular file, is too large, is not JSON, or contains no
            object.
    """
    content = _read_json(path)
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold an object, not {type(content).__name__}")
    return content


def read_json_objects(path: Path) -> list[dict[str, Any]]:
    """Return the list of objects in a file of a checkpoint.

    Raises:
        ModelError: see ``read_json_object``.
    """
    content = _read_json(path)
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise ModelError(f"{path} must hold a list of objects")
    return content


def _read_json(path: Path) -> Any:
    text = read_text(path)
    try:
        return json.loads(text)
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply") from None
    except ValueError as e:
        raise ModelError(f"{path} is not JSON: {e}") from e


def read_text(path: Path) -> str:
    """Return the text of a file of a checkpoint.

    Raises:
        ModelError: the file is not a regular file, is too large, or is not UTF-8.
    """
    check_regular(path)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} has {path.stat().st_size} bytes; at most {MAX_JSON_BYTES}")
        text = path.read_text(encoding="utf-8")
        check_no_pointer(path, text[: len(POINTER)].encode())
        return text
    except OSError as e:
        raise ModelError(f"cannot read {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ModelError(f"{path} is not UTF-8 text: {e}") from e


def check_regular(path: Path) -> None:
    """Raise ModelError if a file is missing or is not regular. Reading a pipe, for example, could
    block.

    A symbolic link counts as its target, because caches of downloads consist of links.
    """
    try:
        mode = path.stat().st_mode
    except OSError as e:
        if path.is_symlink():
            raise ModelError(
                f"cannot read {path}: it is a link to {path.readlink()}, which does not exist; "
                "download the checkpoint again"
            ) from e
        raise ModelError(
            f"cannot read {path}: {e.strerror}; `model` must be the directory of a Hugging Face "
            "checkpoint (config.json, *.safetensors, tokenizer.json)"
        ) from e
    if not stat.S_ISREG(mode):
        raise ModelError(f"{path} is not a regular file")


def check_no_pointer(path: Path, begin: bytes) -> None:
    """Raise ModelError if a file is a pointer of Git LFS. ``begin`` contains the first bytes of the
    file.
    """
    if begin.startswith(POINTER.encode()):
        raise ModelError(
            f"{path} is a pointer of Git LFS, and not the file itself: run `git lfs pull` in its "
            "directory"
        )
