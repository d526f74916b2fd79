"""Loads the emulated CANN libraries, torch and torch_npu into this process, or into another
process.

The order matters: torch is loaded between two groups of libraries, because the second group links
against libtorch_cpu.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from npu_emulator.building import BUILD, SOURCES, build
from npu_emulator.environment import (
    disable_backend_autoload,
    emulated_environment,
    has_emulated_environment,
)
from npu_emulator.errors import EmulatorError
from npu_emulator.files import read_files
from npu_emulator.torch_build import check_torch

_BEFORE_TORCH = (
    "ascendcl",
    "ascend_hal",
    "acl_op_compiler",
    "ge_runner",
    "graph",
    "acl_tdt_channel",
    "metadef",
    "llm_datadist",
)
_AFTER_TORCH = ("hccl", "hcomm", "atb", "opapi", "nnopbase")
# CANN's Python packages. If CANN is installed, its set_env.sh puts them on Python's path.
_PACKAGES = SOURCES / "python" / "site-packages"

_loaded_settings: dict[str, str] | None = None
_preloaded: ctypes.CDLL | None = None  # the library with the settings


def load(settings: Mapping[str, str | int | bool]) -> None:
    """Load the emulated libraries, torch and torch_npu into this process.

    Args:
        settings: see ``README.md``. The settings cannot be changed later in this process.

    Raises:
        BuildError: see ``build``.
        EmulatorError: a setting is unknown or out of range; torch_npu is loaded already; the
            emulator is loaded with other settings; torch is built for CUDA; or a file of rates or
            rules is invalid.
    """
    global _loaded_settings
    wanted = read_files({key: _as_text(value) for key, value in settings.items()})
    if _loaded_settings is not None:
        if wanted != _loaded_settings:
            raise EmulatorError(
                f"the emulator is loaded with {_loaded_settings}, asked for {wanted}"
            )
        return
    if "torch_npu" in sys.modules and not (_preloaded or has_emulated_environment()):
        raise EmulatorError("torch_npu is imported already: load the emulator before it")
    _configure(_preloaded or _load_runtime(), wanted)
    _load_torch()
    _loaded_settings = wanted


def preload() -> None:
    """Load all libraries without settings, and open no device. In a process that is forked
    afterwards, ``load`` is fast, because it only has to apply the settings.

    Raises:
        BuildError: see ``build``.
        EmulatorError: a library cannot be loaded.
    """
    global _preloaded
    runtime = _load_runtime()
    _load_torch()
    _preloaded = runtime


def is_loaded() -> bool:
    """Return whether this process uses the emulated libraries."""
    return _loaded_settings is not None or has_emulated_environment()


def run(
    command: Sequence[str], settings: Mapping[str, str], packages: Sequence[Path] = ()
) -> NoReturn:
    """Replace this process by ``command``. The command and its child processes find the emulated
    NPU, in whatever order they import modules.

    Args:
        packages: further folders from which the command can import.

    Raises:
        BuildError: see ``build``.
        EmulatorError: a setting is unknown or out of range, or a file of rates or rules is invalid;
            torch is built for CUDA; the program does not exist.
    """
    settings = read_files(settings)
    _configure(_load_runtime(), settings)
    folders = [_PACKAGES, *packages]
    if (SOURCES / "npu_emulator").is_dir():
        folders.append(SOURCES)
    environment = emulated_environment(BUILD, folders, Path(sys.executable).parent, settings)
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as e:
        raise EmulatorError(f"cannot run {command[0]}: {e.strerror}") from e


def _load_runtime() -> ctypes.CDLL:
    """Load the libraries that must precede torch. Return the first library, which stores the
    settings.
    """
    check_torch()
    folder = build()
    runtime, *_ = [_preload(folder, name) for name in _BEFORE_TORCH]
    return runtime


def _load_torch() -> None:
    # Otherwise torch would import torch_npu by itself, before the libraries of the loop below are
    # loaded.
    disable_backend_autoload()
    import torch  # noqa: F401

    for name in _AFTER_TORCH:
        _preload(BUILD, name)
    import torch_npu  # noqa: F401

    sys.path.insert(0, str(_PACKAGES))


def _as_text(value: str | int | bool) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _preload(folder: Path, name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise EmulatorError(f"cannot load the emulated lib{name}.so: {error}") from error


def _configure(runtime: ctypes.CDLL, settings: Mapping[str, str]) -> None:
    configure = runtime.emulator_configure
    configure.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    configure.restype = ctypes.c_char_p
    for key, value in settings.items():
        problem = configure(key.encode(), value.encode())
        if problem:
            raise EmulatorError(f"emulator setting: {problem.decode()}")
