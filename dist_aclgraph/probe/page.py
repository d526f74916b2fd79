"""Shows a report as a page, and the report's differences as a table for a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import jinja2

from dist_aclgraph.probe.row import Report, Row, plain

MAX_CELL = 200  # maximum number of characters in a cell
TEMPLATE = Path(__file__).with_name("report.html")
FACTS = "facts"  # folder in the names of questions about the machine


def report_page(report: Report) -> str:
    """Return the report as one HTML file, which needs no other file and runs no script.

    The page shows the facts of the machine, then the differences, then all other answers, grouped
    by the folders of the questions. The report may come from an unknown source, so the page shows
    texts only as plain text.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"plain": plain, "lines": _lines}
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    differences = report.differences()
    facts = [row for row in report.rows if _folder(row) == FACTS]
    others = [row for row in report.rows if row not in facts and row not in differences]
    return page.render(
        report=report,
        device=plain(f"{report.chip or 'no device'}, CANN {report.cann or 'unknown'}"),
        kind="emulated NPU" if report.kind == "emulated" else "NPU",
        facts=facts,
        differences=differences,
        sections=[(title, list(rows)) for title, rows in groupby(others, _folder)],
    )


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a Markdown table; if there are no rows, the only line is "None."."""
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


def _folder(row: Row) -> str:
    return row.name.partition(".")[0]


def _lines(text: str) -> str:
    return "\n".join(map(plain, text.splitlines()))


def _cell(text: str) -> str:
    """Return a text for a table cell: one line without special characters of Markdown or HTML."""
    return re.sub(r"([|<>`*\[\]])", r"\\\1", " ".join(plain(text).split())[:MAX_CELL])
