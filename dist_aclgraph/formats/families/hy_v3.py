"""Hy3: a separator is between the name of a call and its arguments, which are pairs of tags.

    <tool_calls>
    <tool_call>f<tool_sep>
    <arg_key>k</arg_key>
    <arg_value>v</arg_value>
    </tool_call>
    </tool_calls>

The tags of the released checkpoints end with ":opensource", as in ``<tool_calls:opensource>``. The
tags of Hy3-preview have no such ending. The source is the chat template of tencent/Hy3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_aclgraph.formats.json_call import copy_arguments, copy_marked
from dist_aclgraph.formats.lark import Lark
from dist_aclgraph.formats.pair_tags import PairTags, copy_pairs, lark_pairs
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools


@dataclass(frozen=True)
class HyTags:
    """The tags of the format, with or without the ending ":opensource". There are tags around all
    calls, around one call, between a call's name and its arguments, and around the arguments.
    """

    calls: tuple[str, str]
    call: tuple[str, str]
    separator: str
    pairs: PairTags

    @property
    def begins(self) -> tuple[str, str]:
        return self.calls[0], self.call[0]

    @property
    def all(self) -> tuple[str, ...]:
        return *self.calls, *self.call, self.separator, *self.pairs.key, *self.pairs.value


def _spelled(suffix: str) -> HyTags:
    calls, call, key, value = (
        (f"<{name}{suffix}>", f"</{name}{suffix}>")
        for name in ("tool_calls", "tool_call", "arg_key", "arg_value")
    )
    return HyTags(calls, call, f"<tool_sep{suffix}>", PairTags(key, value, call[1]))


RELEASED, PREVIEW = _spelled(":opensource"), _spelled("")
BEGINS = (*RELEASED.begins, *PREVIEW.begins)
MARKERS = (*RELEASED.all, *PREVIEW.all)


def fits(template: str) -> bool:
    return any(
        each.separator in template and each.pairs.key[0] in template for each in (RELEASED, PREVIEW)
    )


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    tags_of = {scanner.coded(each): tags for tags in (RELEASED, PREVIEW) for each in tags.begins}
    begins = list(tags_of)
    marker = yield from scanner.copy_until(begins, scanner.content)
    while marker is not None:
        before: str = marker
        tags = tags_of[before]
        call = scanner.coded(tags.call[0])
        scanner.keep()
        if before != call:
            yield from scanner.skip_space()
            marker = yield from scanner.match(call)
        if marker is None and (yield from scanner.peek()) in ("[", "{"):  # models also write JSON
            marker = yield from copy_marked(scanner, before, scanner.coded(tags.calls[1]), begins)
        elif marker is None:  # the text is no call
            scanner.content(before + scanner.give_back())
            marker = yield from scanner.copy_until(begins, scanner.content)
        else:
            marker = yield from _copy_calls(scanner, tools, tags, before, begins)


def _copy_calls(
    scanner: Scanner, tools: Tools, tags: HyTags, before: str, begins: list[str]
) -> Scan[str | None]:
    """Read calls, and the content after them up to one of ``begins``. The tag before the first call
    was already read. Return the marker that ends the content.

    Args:
        before: the marker before the text that the scanner has kept (``Scanner.keep``). If the kept
            text is not a call, the marker and this text become content.
    """
    call, end_calls = scanner.coded(tags.call[0]), scanner.coded(tags.calls[1])
    key, end_call = scanner.coded(tags.pairs.key[0]), scanner.coded(tags.pairs.end)
    separator = scanner.coded(tags.separator)
    while True:
        name, marker = yield from scanner.read_head([separator, key, end_call, "\n", *begins])
        if marker == "\n":  # models can forget the separator
            yield from scanner.skip_space()
            marker = yield from scanner.match(separator, key, end_call, *begins)
        if marker in begins:
            scanner.content(before + scanner.give_back(marker))
            return marker
        name = name.strip()
        if marker is None or not name or "{" in name:
            scanner.content(before + scanner.give_back())
            return (yield from scanner.copy_until(begins, scanner.content))
        scanner.let_go()
        scanner.begin_call(name)
        if marker == separator:
            yield from scanner.skip_space()
            marker = yield from scanner.match(key, end_call)
        if marker is None and (yield from scanner.peek()) == "{":  # models also write JSON
            if (yield from copy_arguments(scanner)):
                scanner.end_call()
            yield from scanner.skip_space()
            yield from scanner.match(end_call)
        elif not (yield from copy_pairs(scanner, tools.get(name, {}), tags.pairs, marker)):
            return None
        yield from scanner.skip_space()
        marker = yield from scanner.match(call, end_calls)
        if marker != call:
            return (yield from scanner.copy_until(begins, scanner.content))
        before = call
        scanner.keep()


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    tags = _written(lark)
    head = lark.text(f"{tags.call[0]}{name}{tags.separator}\n")
    parts = lark_pairs(lark, name, schema, tags.pairs)
    return f"{head} {parts} {lark.text(tags.call[1] + chr(10))}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    begin, end = _written(lark).calls
    inner = f"({call})+" if several else call
    return f"{lark.text(begin + chr(10))} {inner} {lark.text(end)}"


def _written(lark: Lark) -> HyTags:
    """Return the tags that are tokens of the checkpoint's vocabulary."""
    return RELEASED if lark.is_token(RELEASED.calls[0]) else PREVIEW
