"""Reads answers whose text is between two markers, and builds grammars for them. The markers are
not content.
"""

from __future__ import annotations

from collections.abc import Callable

from dist_aclgraph.formats.lark import Lark
from dist_aclgraph.formats.scanner import Scan, Scanner


def read_wrapped(
    scanner: Scanner, around: tuple[str, str], read_answer: Callable[[Scanner], Scan[None]]
) -> Scan[None]:
    """Read an answer, and leave out the two markers around its text.

    Markers that are tokens are left out everywhere. Other markers are left out only if the answer
    begins with the first marker, because ordinary text can also contain the markers.

    Args:
        read_answer: a function that reads the answer without these markers.
    """
    begin, end = map(scanner.coded, around)
    scanner.keep()
    yield from scanner.skip_space()
    is_begun = (yield from scanner.match(begin)) is not None
    if is_begun:
        scanner.let_go()
        yield from scanner.match("\n")
    else:
        scanner.content(scanner.give_back())
    if is_begun or begin != around[0]:
        scanner.left_out = (*scanner.left_out, begin, f"\n{end}", end)
    yield from read_answer(scanner)


def lark_wrapped(lark: Lark, around: tuple[str, str], content: str) -> str:
    """Return a Lark expression for ``content`` with or without the two markers around it."""
    begin, end = map(lark.text, around)
    return f"({begin})? ({content}) ({end})?"
