"""Reads and writes the known answers of real devices: ``emulator/rules/CHIP-CANN.toml``."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from dist_aclgraph.device import emulator
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.files.shipped import shipped
from dist_aclgraph.probe.question import ACCEPTED, MISSING, REFUSED
from dist_aclgraph.probe.questions import PROBES
from dist_aclgraph.probe.row import Report, plain

RuleAnswer = str | float
FOLDER = shipped("emulator") / "rules"
_NAME = re.compile(r"[A-Za-z0-9_.]+")


def has_name(chip: str, cann: str) -> bool:
    """Return whether a file name may contain the texts ``chip`` and ``cann``."""
    return bool(_NAME.fullmatch(chip) and _NAME.fullmatch(cann))


def rules_name(chip: str, cann: str) -> str:
    """Return the name of the file for a chip with a version of CANN.

    Raises:
        ConfigError: a name contains a character other than a letter, digit, dot or underscore.
    """
    if not has_name(chip, cann):
        raise ConfigError(f"no rules can be named after the chip {chip!r} with CANN {cann!r}")
    return f"{chip}-{cann}.toml"


@functools.cache
def answers_of(chip: str, cann: str, folder: Path = FOLDER) -> dict[str, RuleAnswer]:
    """Return a mapping from questions to known answers; an empty dictionary for an unknown device.

    Raises:
        DeviceError: the file cannot be read.
        ConfigError: an answer is invalid.
    """
    if not has_name(chip, cann) or not (path := folder / rules_name(chip, cann)).is_file():
        return {}
    answers = emulator.read_rules(path).get("answers", {})
    if not all(isinstance(value, str | int | float) for value in answers.values()):
        raise ConfigError(f"{path}: [answers] must have a text or a number for each question")
    return {name: v if isinstance(v, str) else float(v) for name, v in answers.items()}


def rules_text(report: Report) -> str:
    """Return the text of a file of rules, made from a report's differences.

    ``[settings]`` contains three kinds of settings of the emulator (``emulator/README.md``): facts;
    ``admit``, the rules of the emulator that the device does not have; and ``refuse``, the
    operators that only the device refuses. ``[answers]`` contains the answers that differ from the
    emulator's answers. Numbers are without units. Two numbers match if they differ by at most a
    factor of two.
    """
    rows = {row.name: row for row in report.rows}
    settings = [
        f"{probe.setting} = {_value(row.found, row.number)}"
        for probe in PROBES
        if probe.setting
        and (row := rows.get(probe.name))
        # Leave out refusals, which have an error text, and hangs, which have no duration.
        and not row.text
        and row.us is not None
    ]
    different = {row.name: row.found for row in report.differences()}
    admitted = [p.rule for p in PROBES if p.rule and different.get(p.name) == ACCEPTED]
    refused = [
        p.operator for p in PROBES if p.operator and different.get(p.name) in (REFUSED, MISSING)
    ]
    settings += [
        f"{name} = [{', '.join(map(_text, parts))}]"
        for name, parts in (("admit", admitted), ("refuse", refused))
        if parts
    ]
    answers = [
        f"{_text(row.name)} = {_value(row.found, row.number)}"
        f"  # the emulator: {plain(row.emulator)}"
        for row in report.differences()
    ]
    head = [f"chip = {_text(report.chip)}", f"cann = {_text(report.cann)}"]
    return "\n".join([*head, "", "[settings]", *settings, "", "[answers]", *answers, ""])


def _value(found: str, number: float | None) -> str:
    if number is None:
        return _text(found)
    return str(int(number)) if number.is_integer() else repr(number)


def _text(text: str) -> str:
    return json.dumps(plain(text), ensure_ascii=False)
