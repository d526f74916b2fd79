"""Build and load the emulated CANN libraries, under which the real torch_npu runs on a CPU.

The libraries are built from the C++ sources in ``emulator/``, and preloaded: libtorch_npu.so needs
CANN libraries with certain SONAMEs, and the loader uses libraries with these SONAMEs that the
process has already loaded. This module is independent of the program that uses the device.
"""

import argparse
import ctypes
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, cast

from dist_aclgraph.config.rates import read_device_rates
from dist_aclgraph.config.rules import read_device_rules
from dist_aclgraph.device.torch_build import check_torch
from dist_aclgraph.device.versions import installed_name
from dist_aclgraph.environment import (
    build_environment,
    cache_directory,
    disable_backend_autoload,
    emulated_environment,
    has_emulated_environment,
)
from dist_aclgraph.errors import DeviceError, EmulatorBuildError
from dist_aclgraph.shipped import is_installed, shipped


def _build_folder() -> Path:
    """Return the folder of the built libraries: in a clone, a folder next to the sources for each
    release series of torch_npu; otherwise, a folder in the user's cache for each installation.
    """
    if not is_installed() and os.access(SOURCES, os.W_OK):
        return SOURCES / f"build-{installed_name()}"
    installation = hashlib.sha256(str(SOURCES).encode()).hexdigest()[:12]
    return cache_directory() / f"emulator-{installation}"


SOURCES = shipped("emulator")
BUILD = _build_folder()

# The order matters: torch is loaded between the two groups, because the second group links against
# libtorch_cpu.
_BEFORE_TORCH = ("ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
_AFTER_TORCH = ("hccl", "opapi", "nnopbase")

_STAMP = BUILD / "stamp"
_LOCK = BUILD / "lock"
_TOOLS = ("g++", "make")
_QUOTED_LINES = 40

OnProgress = Callable[[int, int, str], None]

_loaded_settings: dict[str, str] | None = None
_is_preloaded = False


def is_built() -> bool:
    """Return whether the libraries exist and belong to these sources, wheels and processor."""
    try:
        return _STAMP.read_text() == _fingerprint()
    except OSError:
        return False


def build(progress: OnProgress | None = None) -> Path:
    """Build the libraries if a source, a wheel or the processor changed, and return their folder.

    If several processes call this at the same time, the first one builds, and the others wait.

    Args:
        progress: called with (number of finished steps, number of all steps, last step).

    Raises:
        EmulatorBuildError: g++ or make is missing, or the compiler failed; the message contains the
            last lines of the compiler's output.
    """
    if is_built():
        return BUILD
    if missing := missing_tools():
        raise EmulatorBuildError(
            "there is no NPU here, and the emulated NPU is built at its first use; for the build, "
            f"{' and '.join(missing)} must be installed (Debian, Ubuntu: apt-get install g++ make)"
        )
    BUILD.mkdir(parents=True, exist_ok=True)
    with _one_builder():
        if not is_built():
            _STAMP.unlink(missing_ok=True)
            # Computed before the build, so that the hash omits changes made during the build.
            fingerprint = _fingerprint()
            _make(progress)
            _STAMP.write_text(fingerprint)
    return BUILD


def missing_tools() -> list[str]:
    """Return the programs that a build needs and this machine lacks."""
    return [tool for tool in _TOOLS if shutil.which(tool) is None]


def load(settings: Mapping[str, str | int | bool]) -> None:
    """Load the emulated libraries, torch and torch_npu into this process.

    Args:
        settings: see ``emulator/README.md``; they cannot be changed later in this process.

    Raises:
        EmulatorBuildError: as ``build``.
        DeviceError: a setting is unknown or out of range; torch_npu is loaded already; the emulator
            is loaded with other settings; torch is built for CUDA; or a file of rates or rules is
            invalid.
    """
    global _loaded_settings
    wanted = _with_files({key: _as_text(value) for key, value in settings.items()})
    if _loaded_settings is not None:
        if wanted != _loaded_settings:
            raise DeviceError(f"the emulator is loaded with {_loaded_settings}, asked for {wanted}")
        return
    if "torch_npu" in sys.modules and not (_is_preloaded or has_emulated_environment()):
        raise DeviceError("torch_npu is imported already: load the emulator before it")
    _configure(_load_runtime(), wanted)
    _load_torch()
    _loaded_settings = wanted


def preload() -> None:
    """Load all libraries without settings, and open no device. Afterwards ``load`` is fast in a
    forked process.

    Raises:
        EmulatorBuildError: as ``build``.
        DeviceError: a library cannot be loaded.
    """
    global _is_preloaded
    _load_runtime()
    _load_torch()
    _is_preloaded = True


def _load_runtime() -> ctypes.CDLL:
    """Load and return the library with the settings; torch's libraries are loaded after it."""
    check_torch()
    folder = build()
    runtime, *_ = [_preload(folder, name) for name in _BEFORE_TORCH]
    return runtime


def _load_torch() -> None:
    # Otherwise torch would import torch_npu by itself, before the libraries below are loaded.
    disable_backend_autoload()
    import torch  # noqa: F401

    for name in _AFTER_TORCH:
        _preload(BUILD, name)
    import torch_npu  # noqa: F401


def counters(device: int | None = None) -> dict[str, int]:
    """Return the state and the counters of an emulated device; ``emulator/README.md`` names the
    keys.

    Args:
        device: index of the device in this process; None means the calling thread's current device.

    Raises:
        DeviceError: the emulator is not loaded, or has no such device.
    """
    return _read_numbers("emulator_counters", device)


def ai_cpu_operators(device: int | None = None) -> dict[str, int]:
    """Return how often an emulated device has run each operator on its AI CPU, which is slow.

    Args and errors as ``counters``.
    """
    return _read_numbers("emulator_ai_cpu_operators", device)


def unaligned_operators(device: int | None = None) -> dict[str, int]:
    """Return, by operator, the number of runs on a tensor whose address is no multiple of 32 bytes.

    Args and errors as ``counters``.
    """
    return _read_numbers("emulator_unaligned_operators", device)


def rates() -> dict[str, float]:
    """Return the rates of modelled time; the keys are the names in ``docs/develop/device-time.md``.

    Raises:
        DeviceError: the emulator is not loaded.
    """
    _check_loaded("rates")
    read = ctypes.CDLL("libascendcl.so").emulator_rates
    read.restype = ctypes.c_char_p
    values: dict[str, float] = json.loads(read())
    return values


def _check_loaded(what: str) -> None:
    if _loaded_settings is None and not has_emulated_environment():
        raise DeviceError(f"the emulator is not loaded: it has no {what}")


def _with_files(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings; the names of files of rates and rules are replaced by the files'
    contents.

    A device's rules take precedence over other settings.
    """
    found = {key: value for key, value in settings.items() if key not in ("rates", "rules")}
    if "rates" in settings:
        rates = read_device_rates(settings["rates"])
        found |= {f"rate.{name}": value for name, value in rates.items()}
    if "rules" in settings:
        found |= read_device_rules(settings["rules"])
    return found


def _read_numbers(function: str, device: int | None) -> dict[str, int]:
    _check_loaded("counters")
    text: bytes | None = _reader(function)(-1 if device is None else device)
    if text is None:
        raise DeviceError(f"the emulator has no device {device}")
    values: dict[str, int] = json.loads(text)
    return values


@functools.cache  # cached, because profiled steps call this several times
def _reader(function: str) -> Callable[[int], bytes | None]:
    read = getattr(ctypes.CDLL("libascendcl.so"), function)
    read.restype = ctypes.c_char_p
    return cast("Callable[[int], bytes | None]", read)


def _as_text(value: str | int | bool) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _preload(folder: Path, name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise DeviceError(f"cannot load the emulated lib{name}.so: {error}") from error


def _configure(runtime: ctypes.CDLL, settings: Mapping[str, str]) -> None:
    configure = runtime.emulator_configure
    configure.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    configure.restype = ctypes.c_char_p
    for key, value in settings.items():
        problem = configure(key.encode(), value.encode())
        if problem:
            raise DeviceError(f"emulator setting: {problem.decode()}")


@contextmanager
def _one_builder() -> Iterator[None]:
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fingerprint() -> str:
    """Return a hash of the build's inputs: sources, wheels, interpreter, vector units
    (-march=native).
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
    # Dependency files name their own objects, so a clone must use the folder name that make uses.
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
        raise EmulatorBuildError(f"building the emulator failed ({' '.join(command)}):\n{quoted}")
    if is_installed():
        # The compiled header has 265 MB, and is needed only after a change of the sources.
        (BUILD / "aten.h.gch").unlink(missing_ok=True)


def run(command: Sequence[str], settings: Mapping[str, str]) -> NoReturn:
    """Replace this process by ``command``. The command and its children find the emulated NPU,
    whatever the order of their imports.

    Raises:
        EmulatorBuildError: as ``build``.
        DeviceError: a setting is unknown or out of range, or a file of rates or rules is invalid;
            torch is built for CUDA; there is no such program.
    """
    settings = _with_files(settings)
    _configure(_load_runtime(), settings)
    package = Path(__file__).parents[2]
    environment = emulated_environment(BUILD, package, Path(sys.executable).parent, settings)
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as e:
        raise DeviceError(f"cannot run {command[0]}: {e.strerror}") from e


def main() -> None:
    """Build with one line of progress. With ``run``, start a program on the emulated NPU
    afterwards.
    """
    parser = argparse.ArgumentParser(prog="python -m dist_aclgraph.device.emulator")
    run_parser = parser.add_subparsers(dest="action").add_parser(
        "run", help="run a program, and its children, on the emulated NPU"
    )
    run_parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of emulator/README.md",
    )
    run_parser.add_argument("command", nargs="+", metavar="COMMAND")
    arguments = parser.parse_args()
    _build_with_progress()
    if arguments.action == "run":
        settings = dict(setting.partition("=")[::2] for setting in arguments.set)
        try:
            run(arguments.command, settings)
        except DeviceError as e:
            sys.exit(f"error: {e}")


def _build_with_progress() -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    if is_built():
        return
    columns = (TextColumn("Building the emulated NPU"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(*columns, TextColumn("{task.description}"), console=console) as bar:
            task = bar.add_task("", total=None)
            build(lambda done, total, what: bar.update(
                task, completed=done, total=total, description=what))  # fmt: skip
    except EmulatorBuildError as e:
        console.print(str(e), markup=False)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
