"""Known answers of real devices, as data: ``emulator/rules/CHIP-CANN.toml``, made from a report."""

from __future__ import annotations

import functools
import json
import re
import tomllib
from pathlib import Path

from dist_aclgraph.errors import ConfigError
from dist_aclgraph.probe.question import Between
from dist_aclgraph.probe.questions import PROBES
from dist_aclgraph.probe.row import Report
from dist_aclgraph.shipped import shipped

RuleAnswer = str | float
FOLDER = shipped("emulator") / "rules"
_NAME = re.compile(r"[A-Za-z0-9_.]+")


def rules_name(chip: str, cann: str) -> str:
    """Return the name of the file for a chip with a CANN.

    Raises:
        ConfigError: a name has other characters than letters, digits, dots and underscores.
    """
    if not (_NAME.fullmatch(chip) and _NAME.fullmatch(cann)):
        raise ConfigError(f"no rules can be named after the chip {chip!r} with CANN {cann!r}")
    return f"{chip}-{cann}.toml"


@functools.cache
def answers_of(chip: str, cann: str, folder: Path = FOLDER) -> dict[str, RuleAnswer]:
    """Return the known answers by question; nothing for a device that is not known.

    Raises:
        ConfigError: the file is invalid.
    """
    if not chip or not cann:
        return {}
    path = folder / rules_name(chip, cann)
    if not path.is_file():
        return {}
    try:
        answers = tomllib.loads(path.read_text(encoding="utf-8")).get("answers", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"cannot read the rules {path}: {e}") from e
    is_valid = isinstance(answers, dict) and all(
        isinstance(value, str | int | float) for value in answers.values()
    )
    if not is_valid:
        raise ConfigError(f"{path}: [answers] must have a text or a number for each question")
    return {name: v if isinstance(v, str) else float(v) for name, v in answers.items()}


def rules_text(report: Report) -> str:
    """Return a report's differences as the text of a file of rules.

    ``[settings]`` are settings of the emulator (``emulator/README.md``), ``[answers]`` the answers
    that differ. A number is kept without its unit, and holds within a factor of two.
    """
    rows = {row.name: row for row in report.rows}
    settings = [
        f"{probe.setting} = {_value(row.found, row.number)}"
        for probe in PROBES
        if probe.setting and (row := rows.get(probe.name)) and row.code is None
    ]
    numbers = {probe.name for probe in PROBES if isinstance(probe.says, Between)}
    answers = [
        f"{_text(row.name)} = {_value(row.found, row.number if row.name in numbers else None)}"
        f"  # the emulator: {_plain(row.emulator)}"
        for row in report.differences()
    ]
    head = [f"chip = {_text(report.chip)}", f"cann = {_text(report.cann)}"]
    return "\n".join([*head, "", "[settings]", *settings, "", "[answers]", *answers, ""])


def _value(found: str, number: float | None) -> str:
    if number is None:
        return _text(found)
    return str(int(number)) if number.is_integer() else repr(number)


def _text(text: str) -> str:
    return json.dumps(_plain(text), ensure_ascii=False)


def _plain(text: str) -> str:
    """Return a stranger's text without line ends and control characters."""
    return "".join(c if c.isprintable() else " " for c in text)
