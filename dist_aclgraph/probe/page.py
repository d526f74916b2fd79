"""A report as a page to read, in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dist_aclgraph.probe.row import Report, Row, plain

MAX_CELL = 200  # characters


def report_page(report: Report) -> str:
    """Return the page: differences first, then all answers, then the texts of errors."""
    device = f"{report.chip or 'no device'}, CANN {report.cann or 'unknown'}"
    kind = "emulated NPU" if report.kind == "emulated" else "NPU"
    lines = [
        f"# Probe of {_cell(device)}",
        "",
        f"{kind}; dist-aclgraph {report.version}, level {report.level}; {report.summary()}.",
        "",
        "## Differences",
        "",
        *table(report.differences()),
        "",
        "## All answers",
        "",
        *table(report.rows),
        "",
        "## Details",
    ]
    for row in report.rows:
        if row.text:
            quoted = "\n".join(f"    {line}" for line in row.text.splitlines())
            lines += ["", f"### {_cell(row.name)}", "", quoted]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table, or one word if there is no row."""
    if not rows:
        return ["None."]
    lines = [
        ("name", "question", "emulator", "found", "us", "code"),
        ("---",) * 6,
        *(
            (
                row.name,
                row.question,
                row.emulator,
                row.found,
                "" if row.us is None else f"{row.us:.0f}",
                str(row.code or ""),
            )
            for row in rows
        ),
    ]
    return [f"| {' | '.join(map(_cell, line))} |" for line in lines]


def _cell(text: str) -> str:
    """Return a text for a table cell: one line, without characters that Markdown or HTML
    interprets.
    """
    return re.sub(r"([|<>`*\[\]])", r"\\\1", " ".join(plain(text).split())[:MAX_CELL])
