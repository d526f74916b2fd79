"""``dist-aclgraph probe`` tests the behaviour of this machine's device, and compares reports."""

from __future__ import annotations

import sys
from pathlib import Path

from dist_aclgraph.config import DeviceConfig
from dist_aclgraph.device import emulator
from dist_aclgraph.device.kind import resolve_kind
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.probe.device_rules import rules_name, rules_text
from dist_aclgraph.probe.page import report_page, table
from dist_aclgraph.probe.question import Level
from dist_aclgraph.probe.questions import probes_of
from dist_aclgraph.probe.questions.facts import machine_here
from dist_aclgraph.probe.row import Report, Row, plain, read_report, write_report
from dist_aclgraph.probe.runner import Runner
from dist_aclgraph.version import VERSION


def run_probe(level: Level, out: Path, device: DeviceConfig) -> Report:
    """Run the tests of a level. Leave out tests whose results are already in the report ``out``.
    Write the report and its page.

    Raises:
        ConfigError: ``out`` is the report of another machine, or of other versions of the software.
        DeviceError: the configured device does not exist.
        EmulatorBuildError: the emulator cannot be built.
    """
    kind = resolve_kind(device.kind)
    report = Report(VERSION, kind, level, machine_here())
    if out.exists():
        report = _continued(report, out)
    if kind == "emulated":
        emulator.build()
    probes = probes_of(level)
    runner = Runner(kind, device)

    def show(row: Row) -> None:
        mark = "  DIFFERENT" if row.is_same is False else ""
        print(f"{len(report.rows)}/{len(probes)} {row.name}: {row.found}{mark}", file=sys.stderr)

    runner.run(probes, report, lambda r: write_report(r, out), show)
    write_page(report, out)
    return report


def _continued(new: Report, path: Path) -> Report:
    """Return the report that is stored at ``path``, but with the level of ``new``."""
    report = read_report(path)
    before, now = (
        {"dist-aclgraph": r.version, "device.kind": r.kind, **r.machine} for r in (report, new)
    )
    for name, value in now.items():
        if (found := before.get(name, "unknown")) != value:
            raise ConfigError(
                f"{path} is another machine's report, or of other versions ({name} was "
                f"{plain(found)}, and is {plain(value)}): give another file with --out"
            )
    report.level = new.level
    return report


def page_of(report: Path) -> Path:
    """Return the path of the page that belongs to a report."""
    return report.with_suffix(".html")


def write_page(report: Report, path: Path) -> None:
    """Write the page of the report that is stored at ``path``."""
    page_of(path).write_text(report_page(report), encoding="utf-8")


def compare(path: Path) -> str:
    """Write two files beside a report: the report's page, and rules for the emulator. With the
    rules, the emulator behaves like the device of the report.

    Returns a table of the differences between the device and the emulator.

    Raises:
        ConfigError: the file is not a report, or its device has an invalid name.
    """
    report = read_report(path)
    name = rules_name(report.chip or "unknown", report.cann or "unknown")
    rules = path.with_name(name)
    rules.write_text(rules_text(report), encoding="utf-8")
    write_page(report, path)
    differences = "\n".join(table(report.differences()))
    return (
        f"{differences}\n\n{rules}: copy it to emulator/rules/ to make these answers known\n"
        f"{page_of(path)}: the report as a page"
    )
