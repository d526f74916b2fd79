"""Calls in tags: ``<invoke name="f">`` with ``<parameter name="k">v</parameter>``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_aclgraph.formats.json_call import copy_arguments
from dist_aclgraph.formats.lark import Lark
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools
from dist_aclgraph.formats.typed_values import Arguments

# The patterns use possessive quantifiers (``++``), which never backtrack, so that matching takes
# linear time.
_ATTRIBUTE = re.compile(r"""\b(\w++)\s*+=\s*+(?:"([^"]*+)"|'([^']*+)'|([^\s"'>]++))""")


@dataclass(frozen=True)
class Tags:
    """The tags of a family.

    Attributes:
        calls: the tags before the first call and after the last call.
        invoke: the tags before and after one call. The first tag is stored without its attributes.
        parameter: the tags before and after one parameter. The first tag is stored without its
            attributes.
    """

    calls: tuple[str, str]
    invoke: tuple[str, str]
    parameter: tuple[str, str]

    def coded(self, scanner: Scanner) -> Tags:
        def pair(texts: tuple[str, str]) -> tuple[str, str]:
            return scanner.coded(texts[0]), scanner.coded(texts[1])

        return Tags(pair(self.calls), pair(self.invoke), pair(self.parameter))


def copy_calls(scanner: Scanner, tools: Tools, tags: Tags) -> Scan[None]:
    """Read content and calls."""
    tags = tags.coded(scanner)
    (begin, end), (invoke, _) = tags.calls, tags.invoke
    while marker := (yield from scanner.copy_until([begin, invoke], scanner.content)):
        scanner.keep()
        if marker == begin:
            yield from scanner.skip_space()
            if not (yield from scanner.match(invoke)):
                scanner.content(begin + scanner.give_back())
                continue
        before: str = marker
        while True:
            head, closing = yield from scanner.read_head([">"])
            name = _attributes(scanner.shown(head)).get("name", "")
            # If a model forgets the first marker, the text is a call only if it has the name of a
            # given tool.
            if closing is None or not name or (before == invoke and name not in tools):
                scanner.content(before + scanner.give_back())
                break
            scanner.let_go()
            if not (yield from _copy_call(scanner, name, tools, tags)):
                return
            before = ""
            yield from scanner.skip_space()
            scanner.keep()
            if not (yield from scanner.match(invoke)):
                scanner.let_go()
                yield from scanner.match(end)
                break


def _copy_call(scanner: Scanner, name: str, tools: Tools, tags: Tags) -> Scan[bool]:
    """Read the rest of a call whose first tag was already read. Return false if the answer ended
    within a parameter, or before the call's last tag.
    """
    parameter, end_parameter = tags.parameter
    scanner.begin_call(name)
    yield from scanner.skip_space()
    if (yield from scanner.peek()) == "{":  # models may write all arguments as JSON
        if not (yield from copy_arguments(scanner)):
            return True
        scanner.end_call()
        yield from scanner.skip_space()
        yield from scanner.match(tags.invoke[1])
        return True
    arguments = Arguments(scanner, tools.get(name, {}))
    while True:
        yield from scanner.skip_space()
        if not (yield from scanner.match(parameter)):
            break
        head, closing = yield from scanner.read_until([">"])
        if closing is None:
            return False
        attributes = _attributes(scanner.shown(head))
        is_text = {"true": True, "false": False}.get(attributes.get("string", ""))
        ends = [end_parameter]
        key = attributes.get("name", "")
        if (yield from arguments.copy_value(key, ends, is_text=is_text)) is None:
            return False
    if scanner.is_cut(parameter, tags.invoke[1]):
        return False
    arguments.end()
    yield from scanner.match(tags.invoke[1])
    return True


def _attributes(head: str) -> dict[str, str]:
    """Return the attributes of a tag. Values may be in single quotes, in double quotes, or without
    quotes.
    """
    return {name: "".join(values) for name, *values in _ATTRIBUTE.findall(head)}


def lark_call(
    lark: Lark, name: str, schema: Mapping[str, Any] | None, tags: Tags, *, says_type: bool
) -> str:
    """Return an expression for one call.

    Args:
        says_type: true if each parameter has an attribute that is "true" for a string, and "false"
            for any other value.
    """

    def around(is_text: bool) -> tuple[str, str]:
        kind = f' string="{"true" if is_text else "false"}"' if says_type else ""
        return f'{tags.parameter[0]} name="', f'"{kind}>'

    head = lark.text(f'{tags.invoke[0]} name="{name}">\n')
    end = tags.parameter[1]
    parts = lark.parameters(name, schema, around, f"{end}\n", [end])
    return f"{head} {parts} {lark.text(tags.invoke[1] + chr(10))}"


def lark_calls(lark: Lark, call: str, tags: Tags, *, several: bool) -> str:
    inner = f"({call})+" if several else call
    return f"{lark.text(tags.calls[0] + chr(10))} {inner} {lark.text(tags.calls[1])}"
