"""Converts the arguments of calls from plain text to JSON, by the types in the schema."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

from dist_aclgraph.formats.scanner import MAX_HELD_CHARS, Scan, Scanner, with_pairs

MAX_LITERAL_CHARS = 1 << 13  # Python's parser takes 50 ms for a hostile text of this length
MAX_DEPTH = 8  # maximum depth to which a schema is searched for types
_QUOTES = re.compile(r'\\.|"', re.DOTALL)
# Constants in Python's spelling, which some templates write instead of JSON.
WORDS = {"True": True, "False": False, "None": None}
# Models sometimes write all arguments as one object with one of these names.
_ALL = ("arguments", "input", "parameters")
# Schemas of tools also contain these names of types, which JSON Schema does not define.
OTHER_NAMES = {
    **{"int": "integer", "float": "number", "double": "number", "bool": "boolean"},
    **{"str": "string", "dict": "object", "list": "array"},
}
_JSON_WORDS = {"true": True, "false": False, "null": None}


class Arguments:
    """Writes the arguments of one call as a JSON object, value by value.

    Args:
        schema: JSON schema of the tool's parameters.
    """

    def __init__(self, scanner: Scanner, schema: Mapping[str, Any]) -> None:
        self._scanner = scanner
        self._schema = schema
        root = resolve(schema, schema)
        properties = root.get("properties") if isinstance(root, Mapping) else None
        self._names = set(properties) if isinstance(properties, Mapping) else set()
        self._is_empty = True

    def copy_value(
        self, name: str, ends: Sequence[str], *, trims: bool = False, is_text: bool | None = None
    ) -> Scan[str | None]:
        """Read the text of a value up to one of ``ends``; return this end, or None if the answer
        has ended. Strings are passed on piece by piece. Other values are passed on when they are
        complete.

        Args:
            trims: whether one newline is removed at each end of the text.
            is_text: whether the model has marked the value as a string; None if it has not marked
                the value. If ``is_text`` is None, or if the schema allows no string, the schema
                determines the value's type.
        """
        types = types_of(property_of(name, self._schema), self._schema)
        if is_text is None or (is_text and types and "string" not in types):
            is_text = types == {"string"}
        if trims:
            yield from self._scanner.match("\n")
        if self._is_empty and name in _ALL and self._names and name not in self._names:
            return (yield from self._copy_all(name, ends, trims=trims))
        self._begin(name)
        if is_text:
            text = _JsonText(self._scanner, trims=trims)
            end = yield from self._scanner.copy_until(ends, text.add, in_call=True)
            text.end(is_whole=end is not None)
            return end
        raw, end = yield from self._read_raw(ends)
        value = as_json(raw.removesuffix("\n") if trims else raw, types)
        # If the answer ends within a value, ``as_json`` may return the incomplete value as a
        # string. Such a string is not emitted.
        if end is not None or not value.startswith('"'):
            self._scanner.arguments(value)
        return end

    def _copy_all(self, name: str, ends: Sequence[str], *, trims: bool) -> Scan[str | None]:
        """Read a value. If the value is a JSON object whose keys are parameters of the tool, the
        object contains all arguments of the call. Any other value becomes the value of the argument
        ``name``.
        """
        raw, end = yield from self._read_raw(ends)
        found = self._object_of(raw)
        if end is not None and found is not None:
            self._scanner.arguments(found)
            self._is_empty = not found
            return end
        self._begin(name)
        value = as_json(raw.removesuffix("\n") if trims else raw, frozenset())
        if end is not None or not value.startswith('"'):
            self._scanner.arguments(value)
        return end

    def _object_of(self, text: str) -> str | None:
        """Return the text of a JSON object without its last brace; "" if the object has no members.
        Return None if the text is not an object, or if a name in it is not a parameter's name.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or not found.keys() <= self._names:
            return None
        return json.dumps(found, ensure_ascii=False)[:-1] if found else ""

    def _read_raw(self, ends: Sequence[str]) -> Scan[tuple[str, str | None]]:
        """Return the text of a value of any type, and the element of ``ends`` that follows the
        value.

        A string within JSON may contain one of ``ends``, but no marker token. If a string is never
        closed, the value ends at the first of ``ends``, like all later values of the answer.
        """
        first, end = yield from self._scanner.read_until(ends)
        pieces, last = [first], end
        is_json = self._scanner.strings_end and first.lstrip()[:1] in ("{", "[", '"')
        is_string = is_json and _ends_in_string(first)
        num_chars = len(first)
        while is_string and last is not None and not self._scanner.has_marker(last):
            text, following = yield from self._scanner.read_until(ends)
            pieces += [last, text]
            num_chars += len(last) + len(text)
            has_marker = self._scanner.has_marker(text)
            is_string = has_marker or _ends_in_string(last + text, is_string=True)
            last = following
            if num_chars > MAX_HELD_CHARS or has_marker:
                break
        if is_string and len(pieces) > 1:
            # In later values, the end of a string is not searched. Each search could read all of
            # the remaining text.
            self._scanner.strings_end = False
            self._scanner.unread("".join(pieces[2:]) + (last or ""))
            pieces, last = [first], end
        return self._scanner.shown("".join(pieces)), last

    def end(self) -> None:
        self._scanner.arguments("{}" if self._is_empty else "}")
        self._scanner.end_call()

    def _begin(self, name: str) -> None:
        key = json.dumps(self._scanner.shown(name), ensure_ascii=False)
        self._scanner.arguments(("{" if self._is_empty else ", ") + key + ": ")
        self._is_empty = False


class _JsonText:
    """Writes a JSON string piece by piece."""

    def __init__(self, scanner: Scanner, *, trims: bool) -> None:
        self._scanner = scanner
        self._trims = trims
        self._newline = ""
        scanner.arguments('"')

    def add(self, piece: str) -> None:
        piece = self._newline + piece
        self._newline = ""
        if self._trims and piece.endswith("\n"):
            piece, self._newline = piece[:-1], "\n"
        # ``json.dumps`` would create an encoder for each piece.
        self._scanner.arguments(encode_basestring(piece)[1:-1])

    def end(self, *, is_whole: bool) -> None:
        if is_whole:
            self._scanner.arguments('"')


def _ends_in_string(text: str, *, is_string: bool = False) -> bool:
    """Return whether a text of JSON ends within a string.

    Args:
        is_string: whether the text begins within a string.
    """
    quotes = sum(found == '"' for found in _QUOTES.findall(text))
    return is_string != bool(quotes % 2)


def as_json(text: str, types: frozenset[str] | set[str]) -> str:
    """Return a text as JSON: as a value of one of the types if possible, otherwise as a string.

    Args:
        types: names of JSON schema's types; empty if every type is allowed.
    """
    stripped = text.strip()
    if stripped.lower() in ("true", "false") and "boolean" in types and "string" not in types:
        return stripped.lower()
    if len(text) <= MAX_HELD_CHARS:
        try:
            value, found = read_value(stripped)
        except ValueError:
            pass
        else:
            # Text that is neither JSON nor a constant may be a string without quotes. Such text is
            # read as a Python literal only if the types include array or object, but not string.
            is_sure = found == stripped or stripped in WORDS
            is_needed = bool(types & {"array", "object"}) and "string" not in types
            if has_type(value, types) and (is_sure or is_needed):
                return found
    return json.dumps(text, ensure_ascii=False)


def read_value(text: str) -> tuple[Any, str]:
    """Read a text that is JSON or a short Python literal. Return its value, and the value as JSON.
    A text that is already JSON is not changed.

    A text may mix the constants of JSON and Python, and its strings may contain line breaks.

    Raises:
        ValueError: the text is neither JSON nor a literal, or JSON cannot represent its value.
    """
    try:
        return json.loads(text, parse_constant=_refuse), text
    except (ValueError, RecursionError):
        pass
    texts = (text, text.replace("\n", "\\n")) if len(text) <= MAX_LITERAL_CHARS else ()
    for each in dict.fromkeys(texts):
        try:
            value = ast.literal_eval(_PythonWords().visit(ast.parse(each, mode="eval")))
            found = with_pairs(json.dumps(value, ensure_ascii=False, allow_nan=False))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return json.loads(found), found
    raise ValueError("the text is neither JSON nor a Python literal")


class _PythonWords(ast.NodeTransformer):
    """Replaces ``true``, ``false`` and ``null`` by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


def has_type(value: Any, types: frozenset[str] | set[str]) -> bool:
    """Return whether a value has one of the types; true if ``types`` is empty."""
    kind = _type_of(value)
    return not types or kind in types or (kind == "integer" and "number" in types)


def types_of(schema: Any, root: Any) -> set[str]:
    """Return the names of the types that a schema allows; empty if the types are not restricted."""
    return _types(schema, root, {}, 0) or set()


def _types(
    schema: Any, root: Any, known: dict[str, set[str] | None], depth: int
) -> set[str] | None:
    """Return the names of the types that a schema allows; None if the types are not restricted.

    Args:
        known: the types found so far for each ``$ref``. Each ``$ref`` is followed only once,
            because the number of paths through a schema can be exponential.
    """
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return None
    reference = schema.get("$ref")
    if reference is not None:
        if not isinstance(reference, str):
            return None
        if reference not in known:
            known[reference] = set()  # a reference that leads to itself adds no type
            known[reference] = _types(resolve(schema, root), root, known, depth + 1)
        return known[reference]
    kind = schema.get("type")
    if isinstance(kind, str):
        return {OTHER_NAMES.get(kind, kind)}
    if isinstance(kind, list):
        return {OTHER_NAMES.get(each, each) for each in kind if isinstance(each, str)}
    if isinstance(values := schema.get("enum"), list):
        return {_type_of(value) for value in values}
    if "const" in schema:
        return {_type_of(schema["const"])}
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list):
            found = [_types(part, root, known, depth + 1) for part in parts]
            said = [types for types in found if types is not None]
            is_said = bool(said) if key == "allOf" else len(said) == len(found)
            return set().union(*said) if is_said else None
    return None


def property_of(name: str, root: Any) -> Any:
    """Return the schema of a tool's parameter; None if the tool's schema ``root`` has no such
    parameter.
    """
    schema = resolve(root, root)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(name) if isinstance(properties, Mapping) else None


def resolve(schema: Any, root: Any) -> Any:
    """Return the schema that a reference within ``root`` names; return any other schema
    unchanged.
    """
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        schema = target_of(reference, root)
    return None


def target_of(reference: str, root: Any) -> Any:
    """Return the part of ``root`` that a reference names; None if there is no such part."""
    if not reference.startswith("#/"):
        return None
    found = root
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
    ):
        if isinstance(value, kind):
            return name
    return "object"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
