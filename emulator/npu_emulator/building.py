"""Builds the emulated CANN libraries from the C++ sources, with g++ and make."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from npu_emulator.environment import build_environment, cache_directory
from npu_emulator.errors import BuildError
from npu_emulator.torch_build import check_installed, torch_series

_PACKAGE = Path(__file__).resolve().parent
_INSIDE = _PACKAGE / "sources"  # setup.py copies the sources to this folder of a wheel
SOURCES = _INSIDE if _INSIDE.is_dir() else _PACKAGE.parent
_IS_CLONE = (SOURCES / "pyproject.toml").is_file()
_TOOLS = ("g++", "make")
_QUOTED_LINES = 40

OnProgress = Callable[[int, int, str], None]


def _build_folder() -> Path:
    """Return the folder of the built libraries. In a clone of the repository, the folder is next to
    the sources, and each release series of torch has its own folder. Without a clone, the folder is
    in the user's cache, and each installation has its own folder.
    """
    if _IS_CLONE and os.access(SOURCES, os.W_OK):
        return SOURCES / f"build-{torch_series()}"
    installation = hashlib.sha256(f"{SOURCES} {sys.prefix}".encode()).hexdigest()[:12]
    return cache_directory() / installation


BUILD = _build_folder()
_STAMP = BUILD / "stamp"
_LOCK = BUILD / "lock"


def is_built() -> bool:
    """Return whether libraries exist that were built from the present sources, with the installed
    wheels, and for this processor.
    """
    try:
        return _STAMP.read_text() == _fingerprint()
    except OSError:
        return False


def build(progress: OnProgress | None = None) -> Path:
    """Build the libraries if a source, a wheel or the processor has changed. Return their folder.

    If several processes call this at the same time, the first one builds, and the others wait.

    Args:
        progress: a function that is called with (number of finished steps, number of all steps,
            name of the last step).

    Raises:
        BuildError: g++ or make is missing, or the compiler failed. The message contains the last
            lines of the compiler's output.
        EmulatorError: torch or torch_npu is not installed.
    """
    check_installed()
    if is_built():
        return BUILD
    if missing := missing_tools():
        raise BuildError(
            "there is no NPU here, and the emulated NPU is built at its first use; for the build, "
            f"{' and '.join(missing)} must be installed (Debian, Ubuntu: apt-get install g++ make)"
        )
    BUILD.mkdir(parents=True, exist_ok=True)
    with _one_builder():
        if not is_built():
            _STAMP.unlink(missing_ok=True)
            # The hash is computed before the build. So if a source changes during the build, the
            # next call builds again.
            fingerprint = _fingerprint()
            _make(progress)
            _STAMP.write_text(fingerprint)
    return BUILD


def missing_tools() -> list[str]:
    """Return the names of the programs that a build needs, but that this machine does not have."""
    return [tool for tool in _TOOLS if shutil.which(tool) is None]


@contextmanager
def _one_builder() -> Iterator[None]:
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fingerprint() -> str:
    """Return a hash of all inputs of the build: the sources, the wheels, the interpreter, and the
    processor's vector units (-march=native).
    """
    digest = hashlib.sha256()
    for path in sorted([SOURCES / "Makefile", *SOURCES.glob("src/**/*"), *SOURCES.glob("tools/*")]):
        if path.is_file():
            digest.update(str(path.relative_to(SOURCES)).encode())
            digest.update(path.read_bytes())
    for wheel in ("torch", "torch_npu"):
        digest.update(importlib.metadata.version(wheel).encode())
    digest.update(_processor_features().encode())
    return digest.hexdigest()


def _processor_features() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _make(progress: OnProgress | None) -> None:
    # Dependency files contain the paths of the objects, and these paths begin with make's variable
    # B. In a clone, B gets the Makefile's default value, so that each build uses the same paths.
    folder = BUILD.name if BUILD.parent == SOURCES else BUILD
    command = ["make", "-C", str(SOURCES), "--no-print-directory", f"PYTHON={sys.executable}"]
    command.append(f"B={folder}")
    environment = build_environment()
    plan = subprocess.run([*command, "-n"], capture_output=True, text=True, env=environment)
    total = sum(line.startswith("echo ") for line in plan.stdout.splitlines())
    process = subprocess.Popen(
        [*command, f"-j{min(os.cpu_count() or 1, 8)}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    lines: list[str] = []
    done = 0
    for line in process.stdout:
        lines.append(line.rstrip())
        if line.startswith(("compile ", "link ")):
            done += 1
            if progress:
                progress(done, max(done, total), line.strip())
    if process.wait():
        quoted = "\n".join(lines[-_QUOTED_LINES:])
        raise BuildError(f"building the emulator failed ({' '.join(command)}):\n{quoted}")
