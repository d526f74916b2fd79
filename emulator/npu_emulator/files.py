"""Files of settings: rates of modelled time, and rules of real devices."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

from npu_emulator.errors import EmulatorError


def read_files(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings. The settings ``rates`` and ``rules`` are names of files; the contents of
    the files replace these two settings.

    If a setting is also in the file of rules, the value in the file is used.

    Raises:
        EmulatorError: a file cannot be read, or is no file of rates or rules.
    """
    found = {key: value for key, value in settings.items() if key not in ("rates", "rules")}
    if "rates" in settings:
        rates = read_rates(settings["rates"])
        found |= {f"rate.{name}": value for name, value in rates.items()}
    if "rules" in settings:
        found |= _settings_of(read_rules(settings["rules"]))
    return found


def read_rates(path: str | Path) -> dict[str, str]:
    """Return the rates in a YAML or JSON file. The names and the numbers are not checked here.

    Raises:
        EmulatorError: the file cannot be read, or is not a map of rates.
    """
    import yaml  # only programs with a file of rates need yaml

    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EmulatorError(f"cannot read the rates {path}: {error}") from error
    if not isinstance(values, dict):
        raise EmulatorError(f"the rates {path} must be names with numbers, such as matmul_us: 4.5")
    return {str(name): str(value) for name, value in values.items()}


def read_rules(path: str | Path) -> dict[str, Any]:
    """Return the contents of a file of rules: the tables ``settings`` and ``answers``.

    Raises:
        EmulatorError: the file cannot be read, or is no file of rules.
    """
    try:
        rules = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise EmulatorError(f"cannot read the rules {path}: {error}") from error
    if not all(isinstance(rules.get(name, {}), dict) for name in ("settings", "answers")):
        raise EmulatorError(f"the rules {path} must have [settings] and [answers]")
    return rules


def _settings_of(rules: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings in a file of rules. Their names and values are not checked here."""
    return {
        # The parts of a list are quoted, because a setting must not contain white space: all
        # settings are passed as one line of words.
        name: ";".join(quote_plus(str(part)) for part in value)
        if isinstance(value, list)
        else str(value)
        for name, value in rules.get("settings", {}).items()
    }
