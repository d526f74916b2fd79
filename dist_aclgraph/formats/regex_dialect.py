"""Writes regular expressions of ECMAScript and Python in the dialect of llguidance.

llguidance reads regular expressions as Rust's library ``regex`` does. In this dialect, "[" within a
class begins another class. "&&", "--" and "~~" are operators of classes. A "-" cannot follow a
class such as ``\\w``. A brace that is not a quantifier is an error.
"""

from __future__ import annotations

import re

_ESCAPE = re.compile(
    r"\\(?:u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|[uxpP]\{[^}]*\}|c[A-Za-z]|.)", re.DOTALL
)
# The pattern includes the form ``{,N}``, which llguidance refuses. This form has different meanings
# in ECMAScript and Python.
_QUANTIFIER = re.compile(r"\{(?:[0-9]+(?:,[0-9]*)?|,[0-9]+)\}")
_NAMED_CLASS = re.compile(r"\[:\^?[a-z]+:\]")  # such as [:alpha:]
_OPERATORS = "[&~-"  # within a class, these characters are escaped
_SETS = "dDsSwWpP"  # letters of escapes that match more than one character


def in_dialect(pattern: str) -> str:
    """Return a regular expression in llguidance's dialect. An expression that is already in this
    dialect, and has no operators of classes, keeps its meaning.
    """
    found, at = "", 0
    while at < len(pattern):
        if escape := _ESCAPE.match(pattern, at):
            found += _escape(escape[0])
            at = escape.end()
        elif pattern[at] == "[":
            text, at = _class(pattern, at)
            found += text
        else:
            is_literal = pattern[at] == "{" and not _QUANTIFIER.match(pattern, at)
            found += "\\" * is_literal + pattern[at]
            at += 1
    return found


def _class(pattern: str, begin: int) -> tuple[str, int]:
    """Return the class that begins at an index, and the index of the character after the class. A
    class without an end is returned unchanged.
    """
    at = begin + 1 + pattern.startswith("^", begin + 1)
    found, is_set = pattern[begin:at], False
    first = at  # a "]" that begins a class is a character
    while at < len(pattern) and (at == first or pattern[at] != "]"):
        item, at = _item(pattern, at)
        is_set = len(item) > 1 and (item[0] == "[" or item[1] in _SETS)
        found += item
        # A hyphen between two characters stands for a range.
        is_range = pattern.startswith("-", at) and at + 1 < len(pattern) and pattern[at + 1] != "]"
        if is_range and not is_set:
            last, after = _item(pattern, at + 1)
            if not (len(last) > 1 and (last[0] == "[" or last[1] in _SETS)):
                found += f"-{last}"
                at = after
    if at == len(pattern):
        return pattern[begin:], at
    return found + "]", at + 1


def _item(pattern: str, at: int) -> tuple[str, int]:
    """Return the element of a class at an index (a character, or an escape for several characters),
    and the index after the element.
    """
    if escape := _ESCAPE.match(pattern, at):
        text = "\\x08" if escape[0] == "\\b" else _escape(escape[0])
        return text, escape.end()
    if named := _NAMED_CLASS.match(pattern, at):
        return named[0], named.end()
    sign = pattern[at]
    return "\\" * (sign in _OPERATORS) + sign, at + 1


def _escape(escape: str) -> str:
    if escape[1] == "c" and len(escape) == 3:  # a control character
        return f"\\x{ord(escape[2]) % 32:02x}"
    return escape
