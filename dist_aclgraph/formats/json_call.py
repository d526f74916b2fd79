"""Calls as JSON objects, such as ``{"name": "f", "arguments": {...}}``."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Sequence
from enum import Enum

from dist_aclgraph.formats.scanner import MAX_HEAD_CHARS, MAX_HELD_CHARS, Scan, Scanner, with_pairs

ARGUMENT_KEYS = ("arguments", "parameters")
# keys that the object of a call may have, besides the name
KEYS = ("type", "id", "index", "tool_call_id", *ARGUMENT_KEYS)


class CallOutcome(Enum):
    NO_CALL = "no call"  # the text is not a call; nothing was emitted
    CUT = "cut"  # the call began, and its arguments are incomplete
    WHOLE = "whole"


CopyCall = Callable[[Scanner], Scan[CallOutcome]]  # reads one call


def copy_call(
    scanner: Scanner, known: Container[str] | None = None, name_key: str = "name"
) -> Scan[CallOutcome]:
    """Read the JSON object of a call, and emit its arguments piece by piece.

    ``CallBegin`` is emitted when the name was read and the arguments begin. If the object has an
    unknown key (not in ``KEYS``) before the arguments begin, the object is not a call. Members
    after the arguments are ignored. A missing closing brace of the object is not an error.

    Args:
        known: names of tools; an object with another name is not a call. None allows all names.
        name_key: the JSON key whose value is the call's name.
    """
    if not (yield from scanner.match("{")):
        return CallOutcome.NO_CALL
    name: str | None = None
    held: str | None = None  # arguments that the model wrote before the name
    is_begun = False
    while not (yield from _at_end(scanner)):
        most = MAX_HELD_CHARS if is_begun else MAX_HEAD_CHARS
        key = yield from scanner.read_json_string(most)
        yield from scanner.skip_space()
        if key is None or not (yield from scanner.match(":")):
            break
        yield from scanner.skip_space()
        if not is_begun and key not in (name_key, *KEYS):
            return CallOutcome.NO_CALL
        if key == name_key and name is None:
            name = yield from scanner.read_json_string(most)
            if not name or (known is not None and name not in known):
                return CallOutcome.NO_CALL
        elif key in ARGUMENT_KEYS and name is not None and not is_begun:
            is_begun = True
            scanner.begin_call(name)
            if not (yield from copy_arguments(scanner)):
                return CallOutcome.CUT
        else:
            text = yield from scanner.read_json(MAX_HELD_CHARS if key in ARGUMENT_KEYS else most)
            if text is None:
                break
            held = text if key in ARGUMENT_KEYS else held
        yield from scanner.skip_space()
        if not (yield from scanner.match(",")) and (yield from scanner.peek()) != "}":
            break
    else:
        if name is not None and not is_begun:
            is_begun = True
            scanner.begin_call(name)
            scanner.arguments(_object_of(held or ""))
    if not is_begun:
        return CallOutcome.NO_CALL
    scanner.end_call()
    return CallOutcome.WHOLE


def copy_keyed_call(scanner: Scanner) -> Scan[CallOutcome]:
    """Read a call whose only key is its name: ``{"f": {...}}``."""
    if not (yield from scanner.match("{")):
        return CallOutcome.NO_CALL
    yield from scanner.skip_space()
    name = yield from scanner.read_json_string(MAX_HEAD_CHARS)
    yield from scanner.skip_space()
    if not name or not (yield from scanner.match(":")):
        return CallOutcome.NO_CALL
    yield from scanner.skip_space()
    if (yield from scanner.peek()) != "{":
        return CallOutcome.NO_CALL
    scanner.begin_call(name)
    if not (yield from copy_arguments(scanner)):
        return CallOutcome.CUT
    yield from scanner.skip_space()
    yield from scanner.match("}")
    scanner.end_call()
    return CallOutcome.WHOLE


def copy_arguments(scanner: Scanner) -> Scan[bool]:
    """Emit the arguments; if there are no arguments, emit an empty object. The arguments may also
    be a string that contains JSON text.

    Returns:
        whether the arguments are complete.
    """
    text: str | None = yield from scanner.match("null")
    first = yield from scanner.peek()
    if text is None and first in ("{", "["):
        return (yield from scanner.copy_json(scanner.arguments))
    is_absent = first in ("}", "`", "<") or scanner.has_marker(first)
    if text is None and not is_absent:
        text = yield from scanner.read_json()
    if is_absent or text is not None:
        scanner.arguments(_object_of(text or ""))
    return is_absent or text is not None


def _object_of(text: str) -> str:
    """Return the arguments as JSON text. The argument ``text`` is a JSON object, a JSON string that
    contains the text of a JSON object, or null. Null stands for an empty object.
    """
    if text.startswith('"'):
        text = with_pairs(json.loads(text, strict=False))
    return "{}" if text.strip() in ("", "null") else text


def copy_calls(scanner: Scanner, before: str, copy: CopyCall = copy_call) -> Scan[None]:
    """Read calls in a list. Some models omit the brackets or the commas of the list.

    Reading ends at the first text that is not a call. This text, which the scanner has kept,
    becomes content.

    Args:
        before: the marker before the text that the scanner has kept (``Scanner.keep``). If no call
            follows, the marker also becomes content.
    """
    yield from scanner.match("[")
    while True:
        yield from scanner.skip_space()
        outcome = yield from copy(scanner)
        if outcome is CallOutcome.NO_CALL:
            scanner.content(before + scanner.give_back())
            return
        scanner.let_go()
        if outcome is CallOutcome.CUT:
            return
        yield from scanner.skip_space()
        before = ""
        scanner.keep()
        if not (yield from scanner.match(",")) and (yield from scanner.peek()) != "{":
            scanner.let_go()
            yield from scanner.match("]")
            return


def copy_lists(scanner: Scanner, begin: str, end: str, copy: CopyCall) -> Scan[None]:
    """Read content in which lists of calls are between two markers. A marker ``end`` that directly
    follows the calls is removed; at any other place it is content.

    Args:
        copy: a function that reads one call.
    """
    marker = yield from scanner.copy_until([begin], scanner.content)
    while marker is not None:
        scanner.keep()
        yield from scanner.skip_space()
        num_calls = scanner.num_calls
        yield from copy_calls(scanner, begin, copy)
        if scanner.num_calls > num_calls:
            yield from scanner.skip_space()
            yield from scanner.match(end)
        marker = yield from scanner.copy_until([begin], scanner.content)


def copy_marked_calls(scanner: Scanner, begin: str, end: str) -> Scan[None]:
    """Read content in which each call is between two markers.

    If the text between two markers is not a call, the text and both markers are content.
    """
    marker = yield from scanner.copy_until([begin], scanner.content)
    while marker is not None:
        scanner.keep()
        yield from scanner.skip_space()
        marker = yield from copy_marked(scanner, begin, end, [begin])


def copy_marked(scanner: Scanner, before: str, end: str, begins: Sequence[str]) -> Scan[str | None]:
    """Read calls, the marker ``end`` after the calls, and then content up to one of ``begins``.
    Return the marker at which the content ends.

    Args:
        before: the marker before the text that the scanner has kept (``Scanner.keep``). If no call
            follows, the marker and this text become content.
    """
    num_calls = scanner.num_calls
    yield from copy_calls(scanner, before)
    if scanner.num_calls > num_calls:
        yield from scanner.skip_space()
        marker = yield from scanner.copy_until([end, *begins], scanner.content)
        if marker != end:
            return marker
    return (yield from scanner.copy_until(begins, scanner.content))


def _at_end(scanner: Scanner) -> Scan[bool]:
    yield from scanner.skip_space()
    return (yield from scanner.match("}")) is not None
