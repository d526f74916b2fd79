"""Arguments in pairs of tags: ``<arg_key>k</arg_key>``, then ``<arg_value>v</arg_value>``.

Strings are written without quotes. All other values are written as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_aclgraph.formats.lark import Lark
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.typed_values import Arguments


@dataclass(frozen=True)
class PairTags:
    """The tags of a family.

    Attributes:
        key: the tags before and after the name of an argument.
        value: the tags before and after the value.
        end: the tag after the last pair.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    end: str


def copy_pairs(
    scanner: Scanner, schema: Mapping[str, Any], tags: PairTags, marker: str | None
) -> Scan[bool]:
    """Read the pairs of a call and the tag after the last pair, and emit the arguments.

    Args:
        schema: JSON schema of the tool's parameters.
        marker: the tag that was read last: the first tag of a pair, or the tag after all pairs.
            None if no tag was read.

    Returns:
        whether the call is complete.
    """
    arguments = Arguments(scanner, schema)
    key_begin, key_end = map(scanner.coded, tags.key)
    value_begin, value_end = map(scanner.coded, tags.value)
    end = scanner.coded(tags.end)
    # Models can forget the end tags. If the next tag is a token, it also ends the text before it.
    value_ends = [value_end, end, *([key_begin] if key_begin != tags.key[0] else [])]
    key_ends = [key_end, end, *([value_begin] if value_begin != tags.value[0] else [])]
    while marker == key_begin:
        key, marker = yield from scanner.read_until(key_ends)
        if marker is None:
            return False
        if marker == end:
            break
        if marker == key_end:
            yield from scanner.skip_space()
            if not (yield from scanner.match(value_begin)):
                marker = None
                break
        marker = yield from arguments.copy_value(key.strip(), value_ends)
        if marker is None:
            return False
        if marker == value_end:
            yield from scanner.skip_space()
            marker = yield from scanner.match(key_begin, end)
    if marker is None and scanner.is_cut(key_begin, value_begin, end):
        return False
    arguments.end()
    return True


def lark_pairs(lark: Lark, name: str, schema: Mapping[str, Any] | None, tags: PairTags) -> str:
    """Return an expression for the pairs of a call, each tag in its own line."""
    between = f"{tags.key[1]}\n{tags.value[0]}"
    ends = (tags.value[1], tags.end)
    return lark.parameters(name, schema, lambda _: (tags.key[0], between), f"{ends[0]}\n", ends)
