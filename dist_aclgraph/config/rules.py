"""Files of the rules of real devices, which ``dist-aclgraph probe --compare`` makes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

from dist_aclgraph.errors import DeviceError


def read_rules(path: str | Path) -> dict[str, Any]:
    """Return the tables of a file of rules: ``settings`` and ``answers``.

    Raises:
        DeviceError: the file cannot be read, or is no file of rules.
    """
    try:
        rules = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DeviceError(f"cannot read the rules {path}: {error}") from error
    if not all(isinstance(rules.get(name, {}), dict) for name in ("settings", "answers")):
        raise DeviceError(f"the rules {path} must have [settings] and [answers]")
    return rules


def read_device_rules(path: str | Path) -> dict[str, str]:
    """Return the emulator's settings in a file of rules, without a check of names and values.

    Raises:
        DeviceError: the file cannot be read, or is no file of rules.
    """
    settings = read_rules(path).get("settings", {})
    return {
        # The settings are passed as one line of words.
        name: ";".join(quote_plus(str(part)) for part in value)
        if isinstance(value, list)
        else str(value)
        for name, value in settings.items()
    }
