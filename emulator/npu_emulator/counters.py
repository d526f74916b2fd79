"""Reads the state and the counters of the emulated devices of this process."""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Callable
from typing import cast

from npu_emulator.errors import EmulatorError
from npu_emulator.loading import is_loaded


def counters(device: int | None = None) -> dict[str, int]:
    """Return the state and the counters of an emulated device; ``README.md`` names the keys.

    Args:
        device: index of the device in this process; None means the calling thread's current device.

    Raises:
        EmulatorError: the emulator is not loaded, or has no such device.
    """
    return _read_numbers("emulator_counters", device)


def ai_cpu_operators(device: int | None = None) -> dict[str, int]:
    """Return how many times an emulated device has run each operator on its AI CPU, which is slow.

    For arguments and errors, see ``counters``.
    """
    return _read_numbers("emulator_ai_cpu_operators", device)


def unaligned_operators(device: int | None = None) -> dict[str, int]:
    """Return, for each operator, how many times it ran with a tensor whose address is no multiple
    of 32 bytes.

    For arguments and errors, see ``counters``.
    """
    return _read_numbers("emulator_unaligned_operators", device)


def rates() -> dict[str, float]:
    """Return the rates of the time model: a mapping from the name of each rate to its value.

    Raises:
        EmulatorError: the emulator is not loaded.
    """
    _check_loaded("rates")
    read = ctypes.CDLL("libascendcl.so").emulator_rates
    read.restype = ctypes.c_char_p
    values: dict[str, float] = json.loads(read())
    return values


def _check_loaded(what: str) -> None:
    if not is_loaded():
        raise EmulatorError(f"the emulator is not loaded: it has no {what}")


def _read_numbers(function: str, device: int | None) -> dict[str, int]:
    _check_loaded("counters")
    text: bytes | None = _reader(function)(-1 if device is None else device)
    if text is None:
        raise EmulatorError(f"the emulator has no device {device}")
    values: dict[str, int] = json.loads(text)
    return values


@functools.cache  # a profiled step calls this function several times
def _reader(function: str) -> Callable[[int], bytes | None]:
    read = getattr(ctypes.CDLL("libascendcl.so"), function)
    read.restype = ctypes.c_char_p
    return cast("Callable[[int], bytes | None]", read)
