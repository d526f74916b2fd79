"""A call as Python writes it: ``f(a=1, b="x")``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dist_aclgraph.formats.lark import Lark, choice_of, parameters_of
from dist_aclgraph.formats.scanner import MAX_HELD_CHARS, Scan, Scanner
from dist_aclgraph.formats.tools import Tools, without_marks
from dist_aclgraph.formats.typed_values import as_json, has_type, property_of, read_value, types_of

MAX_NAME_CHARS = 256
_TOOL_NAME = re.compile(r"[\w.:/-]+")
_NAME = re.compile(r"[^\W\d][\w.-]*")
_ANY_NAME = "/[A-Za-z_][A-Za-z0-9_.-]{0,99}/"  # name of a parameter that the schema does not list
_AFTER_PARAMETER = re.compile(r",\s*(?:[^\W\d][\w.-]*\s*=?|\))?")
# in Python, a string can begin with one of these letters before its quote
_PREFIXES = {"r", "b", "u", "f"}
_NO_NAME = re.compile(r"^(?![^\W\d][\w.-]*\Z)")


def copy_call(scanner: Scanner, tools: Tools) -> Scan[bool]:
    """Read a call of a given tool; return whether the call is complete. If the text is not a call,
    the scanner still keeps the text.
    """
    name = yield from _read_name(scanner, _TOOL_NAME, "(")
    if name not in tools:
        return False
    yield from scanner.skip_space()
    key = ""
    if not (is_whole := (yield from scanner.match(")")) is not None):
        key = yield from _read_name(scanner, _NAME, "=")
        if not key:
            return False
    scanner.let_go()
    scanner.begin_call(name)
    separator = "{"
    while not is_whole:
        text = (yield from _read_literal(scanner)) if key else ""
        if not text:
            return False
        scanner.arguments(f"{separator}{json.dumps(key)}: ")
        separator = ", "
        if not (yield from scanner.peek()):
            scanner.arguments(text)  # the answer is cut off
            return False
        schema = property_of(key, tools[name])
        scanner.arguments(_as_json(scanner.shown(text), types_of(schema, tools[name])))
        yield from scanner.match(",")
        yield from scanner.skip_space()
        is_whole = (yield from scanner.match(")")) is not None
        key = "" if is_whole else (yield from _read_name(scanner, _NAME, "="))
    scanner.arguments("{}" if separator == "{" else "}")
    scanner.end_call()
    return True


def _read_name(scanner: Scanner, pattern: re.Pattern[str], end: str) -> Scan[str]:
    """Read a name and the ``end`` after it; return the name, or "" if there is no name."""
    text = ""
    while len(text) < MAX_NAME_CHARS:
        sign = yield from scanner.peek()
        if sign == end:
            yield from scanner.match(end)
            return text.strip()
        if not sign or not pattern.fullmatch(without_marks((text + sign).strip())):
            return ""
        yield from scanner.match(sign)
        text += sign
    return ""


def _read_literal(scanner: Scanner) -> Scan[str]:
    """Return the text of a Python literal, or of a string without quotes. If the literal is too
    long, return "".

    The literal ends before the first of these: a closing parenthesis that was not opened in the
    literal; a comma that precedes another parameter; the end of the answer. A quote after a letter
    is an apostrophe.
    """
    text, depth, quote = "", 0, ""
    while len(text) < MAX_HELD_CHARS:
        sign = yield from scanner.peek()
        if not sign:
            return text
        may_end = not quote and depth == 0 and sign in ",)"
        if may_end and (sign == ")" or (yield from _ends_parameter(scanner))):
            return text
        yield from scanner.match(sign)
        if quote:
            if sign == "\\":
                escaped = yield from scanner.peek()
                yield from scanner.match(escaped)
                sign += escaped
            elif sign == quote:
                quote = ""
        elif sign in "'\"":
            is_apostrophe = text[-1:].isalnum() and text.lower() not in _PREFIXES
            quote = "" if is_apostrophe else sign
        else:
            depth += (sign in "([{") - (sign in ")]}")
        text += sign
    return ""


def _ends_parameter(scanner: Scanner) -> Scan[bool]:
    """Return whether the comma that comes next ends a parameter. Nothing is read."""
    text, sign = "", ""
    while len(text) < MAX_NAME_CHARS and text[-1:] not in ("=", ")"):
        sign = yield from scanner.peek()
        if not sign or not _AFTER_PARAMETER.fullmatch(without_marks(text + sign)):
            break
        yield from scanner.match(sign)
        text += sign
    scanner.unread(text)
    return not sign or text[-1:] in ("=", ")")


def _as_json(text: str, types: set[str]) -> str:
    """Convert the text of a value to JSON. JSON stays unchanged, a Python literal is converted, and
    any other text becomes a JSON string.

    Some templates write the strings of earlier calls without quotes. Other templates write all
    values of earlier calls in quotes. Models imitate their templates. If the schema does not allow
    a string, the text within quotes is read as the value. If the schema allows a string but not the
    type of the value, the value becomes a string.

    Args:
        types: names of the types that the schema allows; empty if every type is allowed.
    """
    stripped = text.strip()
    try:
        value, found = read_value(stripped)
    except ValueError:
        value = stripped
        if stripped[:1] in ("'", '"') and stripped[:1] == stripped[1:][-1:]:
            value = stripped[1:-1]  # a string that contains quotes without escapes
        found = json.dumps(value, ensure_ascii=False)
    if has_type(value, types):
        return found
    if isinstance(value, str):
        return as_json(value, types)
    return json.dumps(stripped, ensure_ascii=False) if "string" in types else found


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    """Return an expression for one call; parameters that are not required come last."""
    found = None if schema is None else parameters_of(name, schema, _NO_NAME)
    if found is None or schema is None:
        part = lark.rule(f'{_ANY_NAME} "=" {_value(lark, {}, {})}')
        parameters = f'({part} (", " {part})*)?'
    else:
        parts: dict[bool, list[str]] = {True: [], False: []}
        for key, value, is_required in found:
            part = lark.rule(f"{lark.text(f'{key}=')} {_value(lark, value, schema)}")
            parts[is_required].append(part)
        parameters = _in_order(lark, parts[True], parts[False])
    return f"{lark.text(f'{name}(')} {parameters} {lark.text(')')}"


def _value(lark: Lark, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """Return an expression for a value of this schema, as JSON or as a Python literal.

    The expression excludes strings without quotes, because the reader would end such a string at a
    parenthesis.
    """
    return choice_of([*lark.spellings(schema, root), *lark.single_quoted(schema, root)])


def _in_order(lark: Lark, required: Sequence[str], others: Sequence[str]) -> str:
    """Return an expression for all parameters of ``required``, then any subset of ``others`` in
    order. Parameters are separated by ", ".
    """
    first = [*required[:1], *(f'", " {part}' for part in required[1:])]
    if first:
        return " ".join([*first, *(f'(", " {part})?' for part in others)])
    begun, after = [], ""  # one alternative for each possible first parameter
    for part in reversed(others):
        begun.append(f"{part} {after}")
        after = lark.rule(f'(", " {part})? {after}')
    return f"({' | '.join(reversed(begun))})?" if begun else ""
