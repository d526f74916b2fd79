"""Tables and figures of benches. All benches use these functions, so that their tables and charts
look alike.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table as TerminalTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GROUP_WIDTH = 0.8  # width of a group of bars, as a fraction of the distance between two ticks
SCALES = {"K": 1 << 10, "M": 1 << 20}

Row = Mapping[str, Any]


class Table(NamedTuple):
    """A table with words in the first column and numbers in the other columns."""

    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]

    def for_terminal(self) -> TerminalTable:
        table = TerminalTable(title=self.title)
        for index, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if index else "left")
        for line in self.lines:
            table.add_row(*line)
        return table

    def for_document(self) -> Iterator[str]:
        """Yield the lines of the table in markdown."""
        rule = ["---"] + ["---:"] * (len(self.headings) - 1)
        yield from (f"| {' | '.join(line)} |" for line in (self.headings, rule, *self.lines))


class Report(NamedTuple):
    """The results of a bench for readers.

    Attributes:
        what: the measured quantity, in a few words.
        tables: the tables, which are shown in the terminal and written to a document.
        aim: the aim in one sentence; "" if the bench has no aim.
    """

    what: str
    tables: Sequence[Table]
    aim: str = ""

    def heading(self, results: Row) -> str:
        """Return a text that describes the measurement and the device."""
        before, after = results["load"]
        return (
            f"{self.what} on {results['cores']} cores, load of the machine {before:.1f} before and "
            f"{after:.1f} after; {results['note']}. {self.aim}"
        ).rstrip()

    def for_document(self, results: Row) -> str:
        lines = [self.heading(results), ""]
        for table in self.tables:
            lines += [*table.for_document(), ""]
        return "\n".join(lines)


class Cells(string.Formatter):
    """Formats the cells of a table. ``{size!K:.0f}`` shows ``size`` divided by 1,024, and ``!M``
    divides by 1,024 squared. None becomes a dash.
    """

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion in SCALES and value is not None:
            return value / SCALES[conversion]
        return value

    def format_field(self, value: Any, format_spec: str) -> str:
        return "-" if value is None else str(super().format_field(value, format_spec))

    def of(self, row: Row, text: str) -> str:
        return self.vformat(text, (), row)

    def value(self, row: Row, field: str) -> Any:
        return self.get_field(field, (), row)[0]


CELLS = Cells()


def make_table(title: str, columns: Mapping[str, str], rows: Sequence[Row]) -> Table:
    """Return a table with one line for each of ``rows``.

    Args:
        columns: maps the heading of each column to the format of its cells (see ``Cells``).
    """
    lines = [[CELLS.of(row, cell) for cell in columns.values()] for row in rows]
    return Table(title, list(columns), lines)


@contextmanager
def sheet(
    path: Path,
    results: Row,
    title: str,
    shape: tuple[int, int] = (2, 2),
    size: tuple[float, float] = (13, 9),
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure and its charts, row by row. Save the figure when the context ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    yield figure, list(figure.subplots(*shape, squeeze=False).flat)
    before, after = results["load"]
    figure.suptitle(
        f"{title}, on {results['cores']} CPU cores with a load of {before:.1f} to {after:.1f}\n"
        f"{results['note']}"
    )
    figure.savefig(path, dpi=110)


def draw_bars(
    axes: Axes,
    rows: Sequence[Row],
    title: str,
    *,
    group: str,
    series: str,
    height: str,
    dots: str = "",
    mark: str = "",
    label: str = "",
    unit: str = "",
    line: float | None = None,
    has_legend: bool = True,
) -> None:
    """Draw one bar for each row. In each group, the bars of all series are side by side.

    Args:
        group: format (see ``Cells``) of the text below a group of bars.
        series: format of the text in the legend.
        label: format of the text above a bar.
        height: name of the field that contains the height of a bar, e.g. ``ratio[median]``.
        dots: name of a field with a list of values, which are drawn as dots, e.g. the values of
            single rounds.
        mark: name of a field with a value for comparison, which is drawn as a mark at the bar.
        line: a value for comparison, which is drawn as a line across all bars.
    """
    groups = list(dict.fromkeys(CELLS.of(row, group) for row in rows))
    names = list(dict.fromkeys(CELLS.of(row, series) for row in rows))
    width = GROUP_WIDTH / len(names)
    for index, name in enumerate(names):
        found = [row for row in rows if CELLS.of(row, series) == name]
        offset = (index - (len(names) - 1) / 2) * width
        places = [groups.index(CELLS.of(row, group)) + offset for row in found]
        bars = axes.bar(
            places, [CELLS.value(row, height) for row in found], width * 0.95, label=name
        )
        if label:
            words = [CELLS.of(row, label) for row in found]
            axes.bar_label(bars, words, fontsize="x-small", padding=6 if dots else 2)
        for place, row in zip(places, found, strict=True):
            if dots:
                values = CELLS.value(row, dots)
                axes.plot([place] * len(values), values, "k.", markersize=3)
            if mark:
                axes.plot([place], [CELLS.value(row, mark)], "k_", markersize=12)
    if line is not None:
        axes.axhline(line, color="gray", linestyle=":")
    axes.set_xticks(range(len(groups)), groups)
    axes.set_title(title, loc="left")
    axes.set_ylabel(unit)
    axes.margins(y=0.25)
    axes.grid(axis="y", alpha=0.3)
    if has_legend:
        axes.legend(fontsize="small")
