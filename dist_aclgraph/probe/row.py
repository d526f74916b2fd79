"""The data of a report, and the functions that read and write a report's file."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from dist_aclgraph.config.device import UNKNOWN_CANN
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.probe.question import Between, Level, Probe

MAX_REPORT_BYTES = 16 << 20
MAX_TEXT = 2000  # maximum number of characters of an error text; longer texts are cut


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer of one child process.

    Attributes:
        found: the answer in plain words.
        number: the answer as a number; None if the answer is not a number.
        us: time that the question took, in microseconds; None if the question did not end.
        code: CANN's error code.
        text: the error, or other details.
        chip: name of the device; "" if no device was opened.
        cann: version of CANN; "" if unknown.
        was_asked: whether the machine has everything that the question needs, and the device was
            opened.
    """

    found: str
    number: float | None = None
    us: float | None = None
    code: int | None = None
    text: str = ""
    chip: str = ""
    cann: str = ""
    was_asked: bool = True


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answered question, with the fields of ``Outcome``.

    Attributes:
        emulator: the expected answer; "" for a fact of the machine.
        is_same: whether the answer is the expected answer. None if there is no expected answer, or
            if the question was not asked.
    """

    name: str
    question: str
    emulator: str
    found: str
    number: float | None
    us: float | None
    code: int | None
    text: str
    is_same: bool | None
    was_asked: bool


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """All answers of one machine.

    Attributes:
        version: version of this package.
        machine: the facts that identify host, wheels and driver, by name.
        running: the question that was running when the file was written. If the run was aborted
            during this question, the question is not asked again.
    """

    version: str
    kind: str
    level: Level
    machine: dict[str, str] = msgspec.field(default_factory=dict)
    chip: str = ""
    cann: str = ""
    running: str | None = None
    rows: list[Row] = msgspec.field(default_factory=list)
    schema: int = 1

    def set_device(self, chip: str, cann: str) -> None:
        """Store chip and CANN of the device that has answered.

        Raises:
            ConfigError: the report has answers of another chip or of another CANN.
        """
        if self.chip and (self.chip, self.cann) != (chip, cann):
            raise ConfigError(
                f"the report has answers of the chip {self.chip} with CANN "
                f"{self.cann or UNKNOWN_CANN}; this is the chip {chip} with CANN "
                f"{cann or UNKNOWN_CANN}: give another file with --out"
            )
        self.chip, self.cann = chip, cann

    def differences(self) -> list[Row]:
        return [row for row in self.rows if row.is_same is False]

    def summary(self) -> str:
        """Return the numbers of questions, of differences, and of questions that were not asked."""
        unasked = sum(not row.was_asked for row in self.rows)
        return (
            f"{len(self.rows)} questions, {len(self.differences())} answers differ from the "
            f"emulator's, {unasked} could not be asked"
        )


def judged(probe: Probe, expected: str | Between | None, outcome: Outcome) -> Row:
    """Compare an answer with the emulator's answer, and return the row with the two answers."""
    is_same: bool | None
    if expected is None or not outcome.was_asked:
        is_same = None
    elif isinstance(expected, Between):
        number = outcome.number
        is_same = number is not None and expected.low <= number <= expected.high
    else:
        is_same = outcome.found == expected
    return Row(
        name=probe.name,
        question=probe.question,
        emulator="" if expected is None else str(expected),
        found=outcome.found,
        number=outcome.number,
        us=outcome.us,
        code=outcome.code,
        text=outcome.text[:MAX_TEXT],
        is_same=is_same,
        was_asked=outcome.was_asked,
    )


def plain(text: str) -> str:
    """Remove line ends and control characters from a text, which may have an unknown source."""
    return "".join(c if c.isprintable() else " " for c in text)


def read_report(path: Path) -> Report:
    """Read a report, which may come from an unknown source.

    Raises:
        ConfigError: the file does not exist, or is not a report.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_REPORT_BYTES + 1)
        if len(content) > MAX_REPORT_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_REPORT_BYTES >> 20} MiB: not a report")
        return msgspec.json.decode(content, type=Report)
    except OSError as e:
        raise ConfigError(f"cannot read the report {path}: {e.strerror}") from e
    except msgspec.MsgspecError as e:
        raise ConfigError(f"{path} is not a report of `dist-aclgraph probe`: {e}") from e


def write_report(report: Report, path: Path) -> None:
    """Write a report atomically, so that the file is valid even if the run is cut off."""
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    written.replace(path)
