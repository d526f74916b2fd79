"""A report as a page to read, in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dist_aclgraph.probe.row import Report, Row

MAX_CELL = 200  # characters


def report_page(report: Report) -> str:
    """Return the page: differences first, then all answers, then the texts of errors."""
    device = f"{report.chip or 'no device'}, CANN {report.cann or 'unknown'}"
    kind = "emulated NPU" if report.kind == "emulated" else "NPU"
    different = report.differences()
    lines = [
        f"# Probe of {_cell(device)}",
        "",
        f"{kind}; dist-aclgraph {report.version}, level {report.level}; "
        f"{len(report.rows)} questions, {len(different)} answers differ from the emulator's.",
        "",
        "## Differences",
        "",
        *difference_table(different),
        "",
        "## All answers",
        "",
        "| question | emulator | found | us | code |",
        "| --- | --- | --- | --- | --- |",
        *(_line(row) for row in report.rows),
        "",
        "## Details",
    ]
    for row in report.rows:
        if row.text:
            quoted = "\n".join(f"    {line}" for line in row.text.splitlines())
            lines += ["", f"### {row.name}", "", quoted]
    return "\n".join(lines) + "\n"


def difference_table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table, or one sentence if there is no difference."""
    if not rows:
        return ["Every answer is the emulator's."]
    return [
        "| name | question | emulator | found | code |",
        "| --- | --- | --- | --- | --- |",
        *(
            _cells(row.name, row.question, row.emulator, row.found, str(row.code or ""))
            for row in rows
        ),
    ]


def _line(row: Row) -> str:
    us = "" if row.us is None else f"{row.us:.0f}"
    mark = "**" if row.is_same is False else ""
    found = f"{mark}{_cell(row.found)}{mark}"
    cells = (row.question, row.emulator)
    return f"| {' | '.join(map(_cell, cells))} | {found} | {us} | {row.code or ''} |"


def _cells(*texts: str) -> str:
    return f"| {' | '.join(map(_cell, texts))} |"


def _cell(text: str) -> str:
    """Return a text for a cell: one line, and no character that Markdown or HTML reads."""
    return re.sub(r"([|<>`*\[\]])", r"\\\1", " ".join(text.split()))[:MAX_CELL]
