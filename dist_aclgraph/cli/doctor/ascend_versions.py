"""The installed versions of CANN and of the driver, and the driver version that replays need."""

from __future__ import annotations

import re
from pathlib import Path

# The first driver that supports task updates, which replays need. With a driver older than 25.5, a
# process can update tasks only a million times.
MIN_DRIVER = (25, 0)
DRIVER = Path("/usr/local/Ascend/driver/version.info")


def read_cann_version(toolkit: Path) -> str | None:
    """Return the version of a CANN toolkit, e.g. 9.1.0; None if there is no toolkit."""
    places = [
        toolkit / "share/info/runtime/version.info",  # path since CANN 8.5
        toolkit / "version.cfg",
        *sorted(toolkit.glob("*-linux/ascend_toolkit_install.info")),
    ]
    return next((found for path in places if (found := read_version(path))), None)


def is_driver_new_enough(version: str) -> bool:
    """Return whether a driver supports replays."""
    numbers = tuple(int(number) for number in re.findall(r"[0-9]+", version)[:2])
    return numbers >= MIN_DRIVER


def read_version(path: Path) -> str | None:
    """Return the first version in a file with lines such as ``version=9.1.0`` or ``[9.1.0:x]``."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"(?i)version\S*\s*=\s*\[?([0-9][0-9A-Za-z.]*)", text)
    return found[1] if found else None
