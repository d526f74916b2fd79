"""The form of a range of TCP ports in the configuration."""

from __future__ import annotations

MAX_PORT = 65535
PORTS_PATTERN = r"^[0-9]{1,5}-[0-9]{1,5}$"


def check_ports(value: str | None) -> str | None:
    """Return the value unchanged.

    Raises:
        ValueError: the range is empty, or has a port outside 1 to ``MAX_PORT``.
    """
    if value is not None:
        first, last = map(int, value.split("-"))
        if not 1 <= first <= last <= MAX_PORT:
            raise ValueError(f"must be FIRST-LAST, from 1 to {MAX_PORT}, e.g. 20000-20100")
    return value


def read_ports(value: str | None) -> range | None:
    """Return the ports of a value that ``check_ports`` has accepted; None if the value is None."""
    if value is None:
        return None
    first, last = map(int, value.split("-"))
    return range(first, last + 1)
