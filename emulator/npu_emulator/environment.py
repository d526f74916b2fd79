"""All environment variables that this package reads or sets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

SETTINGS = "EMULATED_NPU"  # the emulated libraries read this variable, too
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def cache_directory() -> Path:
    """Return the user's cache folder of this package."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "npu-emulator"


def build_environment() -> dict[str, str]:
    """Return the environment for a build: this process's variables without make's flags, which
    exist if make started this process.
    """
    return {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS")}


def disable_backend_autoload() -> None:
    """Prevent torch from importing torch_npu by itself. Such an import would happen before the
    emulated libraries are loaded.
    """
    os.environ[AUTOLOAD] = "0"


def emulated_environment(
    libraries: Path, packages: Sequence[Path], programs: Path, settings: Mapping[str, str]
) -> dict[str, str]:
    """Return an environment in which a program finds the emulated NPU. The program can import its
    modules in any order.

    Args:
        libraries: folder of the emulated CANN.
        packages: folders from which the program can import.
        programs: folder of this interpreter, which also contains pytest and similar programs.
        settings: settings of the emulator.
    """
    paths = {"LD_LIBRARY_PATH": [libraries], "PYTHONPATH": packages, "PATH": [programs]}
    variables = {
        name: os.pathsep.join(filter(None, (*map(str, values), os.environ.get(name))))
        for name, values in paths.items()
    }
    variables[SETTINGS] = " ".join(f"{k}={v}" for k, v in settings.items()) or " "
    variables[AUTOLOAD] = "1"
    return {**os.environ, **variables}


def has_emulated_environment() -> bool:
    """Return whether this process was started in ``emulated_environment``."""
    return SETTINGS in os.environ
