"""Builds grammars for calls of tools, in llguidance's extension of the language of Lark.

A grammar forces the model to call tools, and to write arguments that match a schema. A text in a
grammar cannot match a marker that is a token. For such a marker, the grammar contains the token's
id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.formats.equivalents import use_equivalents
from dist_aclgraph.formats.one_of import is_any_of
from dist_aclgraph.formats.regex_dialect import in_dialect
from dist_aclgraph.formats.schema_values import (
    not_by_parameters,
    pattern_of,
    patterns_of,
    strings_of,
    words_of,
)
from dist_aclgraph.formats.tools import without_marks
from dist_aclgraph.formats.typed_values import MAX_DEPTH, target_of, types_of
from dist_aclgraph.sampling import StructuredOutputs

ANY_OBJECT = {"type": "object"}
JSON_OPTIONS = StructuredOutputs(json_object=True).json_options
ANY = r"(.|\n)*"
ANY_TEXT = f"/{ANY}/"
SPACE = r"[\s\x1c-\x1f]"  # matches the same characters as Python's ``\s``
# Keywords of a schema that restrict a whole object. Other keywords restrict single properties.
_WHOLE = {
    *("anyOf", "oneOf", "allOf", "not", "if", "enum", "const", "$dynamicRef", "propertyNames"),
    *("minProperties", "maxProperties", "patternProperties"),
    *("dependencies", "dependentRequired", "dependentSchemas"),
}
_OF_PARAMETERS = {"properties", "required", "additionalProperties", "unevaluatedProperties"}
_NOT_WRITABLE = re.compile(r'[<>"\n]|^\s|\s\Z|^\Z')  # matches names that tags cannot contain
_INNER = r'[^<>"\s\x1c-\x1f]'
# An expression for the name of a parameter that the schema does not list: any name that tags can
# contain.
ANY_NAME = rf'/{_INNER}([^<>"\n]*{_INNER})?/'
_PLAIN = r"[^'\\\x00-\x1f]"  # matches an unescaped character in a string with single quotes
# Matches an escaped character, "/", or the end of a line.
_ESCAPED = re.compile(r"\\.|[/\n]|\\\Z", re.DOTALL)


class Lark:
    """Collects the rules of one grammar.

    Args:
        token_ids: maps each marker that is a single token to the token's id.
    """

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        self._rules: list[str] = []
        self._terminals: dict[str, str] = {}  # maps each pattern to its terminal's name
        markers = sorted(token_ids, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, markers)) + ")") if markers else None

    def is_token(self, text: str) -> bool:
        return text in self._token_ids

    def text(self, text: str) -> str:
        """Return an expression for a text that may contain markers."""
        parts = [text] if self._split is None else self._split.split(text)
        return " ".join(
            f"<[{self._token_ids[part]}]>" if part in self._token_ids else _quoted(part)
            for part in parts
            if part
        )

    def rule(self, expression: str, options: str = "") -> str:
        """Add a rule, and return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def _terminal(self, pattern: str) -> str:
        """Add a terminal if the grammar does not have it yet; return the terminal's name."""
        if pattern not in self._terminals:
            self._terminals[pattern] = name = f"T{len(self._terminals)}"
            self._rules.append(f"{name}: {pattern}")
        return self._terminals[pattern]

    def part(self, name: str) -> None:
        """Begin a part of the grammar. Error messages about the rules that are added from now on
        contain ``name``.
        """
        self._rules.append(f"// {name}")

    def json(self, schema: Any, options: Mapping[str, Any] = JSON_OPTIONS) -> str:
        """Return a grammar expression that accepts the JSON texts that fit a schema.

        Args:
            options: see ``StructuredOutputs.json_options``.
        """
        # The schema true allows all values, and the schema false allows no value.
        found: dict[str, Any] = {} if schema else {"enum": []}
        if isinstance(schema, Mapping):
            found = json.loads(json.dumps(schema))  # a copy, because keywords are replaced
        use_equivalents(found)
        found["x-guidance"] = {**options, "coerce_one_of": is_any_of(found)}
        return self.rule("%json " + json.dumps(found, ensure_ascii=False))

    def arguments(self, schema: Mapping[str, Any] | None) -> str:
        """Return an expression for arguments as a JSON object. If ``schema`` is None, all objects
        are allowed.

        Many schemas of tools do not say that the arguments are an object, so this method adds the
        type.
        """
        kinds = (schema or {}).get("type", ["object"])
        is_open = isinstance(kinds, list) and "object" in kinds
        return self.json({**schema, **ANY_OBJECT} if schema and is_open else schema or ANY_OBJECT)

    def spellings(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[str]:
        """Return expressions for the values that ``schema``, a part of ``root``, allows. The first
        expression matches all values as JSON. The others match those of Python's True, False and
        None that ``schema`` allows.
        """
        return [self.json(taken_out(schema, root)), *map(_quoted, words_of(schema, root))]

    def single_quoted(self, schema: Any, root: Any) -> list[str]:
        """Return expressions for strings in single quotes: the strings that ``schema``, a part of
        ``root``, allows.
        """
        found = []
        for pattern in patterns_of(schema, root, ["'", "\\"]):
            inner = rf"/({_PLAIN}|\\['\"\\nt])*/"
            # Escapes are not allowed, because the pattern would count an escape as two characters.
            if pattern is not None:
                inner = f"(/{_escaped(pattern)}/ & /{_PLAIN}*/)"
            found.append(self._terminal(f'"\'" {inner} "\'"'))
        return found

    def form(self, form: StructuredOutputs) -> str:
        """Return an expression for a text in the given output format.

        Raises:
            InvalidParameterError: the format is itself a grammar, or its pattern is not a regular
                expression.
        """
        if form.kind == "json":
            return self.json(json.loads(form.text), form.json_options)
        if form.kind == "choice":
            return choice_of([_quoted(text) for text in form.choice or ()])
        if form.kind == "regex":
            return f"/{_escaped(in_dialect(form.text))}/" if form.text else _quoted("")
        raise InvalidParameterError(
            "a grammar cannot be combined with tools, or with this model's reasoning; use a JSON "
            "schema, a regex or a choice",
            "structured_outputs",
        )

    def until(self, pattern: str, end: str, excluded: Sequence[str]) -> str:
        """Return an expression for a text that matches ``pattern``, followed by ``end``.

        Args:
            excluded: texts that must not occur in the text before ``end``.
        """
        first, rest = self._cut(end)
        inner = f"/{_escaped(pattern)}/"
        if texts := self._spelled(excluded):
            inner = f"({inner} & ~/(.|\\n)*({_any_of(texts)})(.|\\n)*/)"
        # A pattern matches as much text as possible. So ``end`` must be a part of the pattern.
        name = self._terminal(f"{inner} {_quoted(first)}" if first else inner)
        return f"{name} {self.text(rest)}" if rest else name

    def text_or_calls(
        self, each: Sequence[str], ways: Sequence[str], begins: Sequence[str], *, several: bool
    ) -> str:
        """Return an expression for text in which a call may begin at any place.

        The texts ``begins`` can occur only at the beginning of a call, and this call must match the
        grammar.

        Args:
            each: for each tool, an expression for one call.
            ways: for each way of writing calls, an expression for one call of any tool.
            begins: the texts at which the reader of the answer begins to read a call.
        """
        if all(way[0] in '"<' for way in ways):  # each way of writing calls begins with a marker
            each = ways
        text = self.until(ANY, "", begins)
        called = choice_of([self._behind_text(text, call, begins) for call in each])
        return f"({called}){'*' if several else '?'} {text}"

    def _behind_text(self, text: str, call: str, begins: Sequence[str]) -> str:
        found = re.match(r'("(?:[^"\\]|\\.)*") ', call)
        if found is None:
            return f"{text} {call}"
        # One terminal contains the text and the beginning of the call. All tools share this
        # terminal.
        head = json.loads(found.group(1))
        begin = begins[0] if head.startswith(begins[0]) else head
        rest = f"{_quoted(head[len(begin) :])} " if head != begin else ""
        return f"{self.until(ANY, begin, begins)} {rest}{call[found.end() :]}"

    def text_unless(self, opens: str, tag: str) -> str:
        """Return an expression for text that does not contain ``tag``, and does not begin with the
        character ``opens``. White space before the first character is allowed.
        """
        sign = f"/{SPACE}*([^\\s\\x1c-\\x1f\\{opens}](.|\\n)*)?/"
        if texts := self._spelled([tag]):
            sign = f"{sign} & ~/(.|\\n)*({_any_of(texts)})(.|\\n)*/"
        return self._terminal(sign)

    def text_without(self, pattern: str) -> str:
        """Return an expression for any text that does not match ``pattern`` as a whole."""
        return self._terminal(f"{ANY_TEXT} & ~/{_escaped(pattern)}/")

    def _cut(self, text: str) -> tuple[str, str]:
        """Split a text before its first marker; return both parts."""
        first = text if self._split is None else self._split.split(text)[0]
        return first, text[len(first) :]

    def _spelled(self, texts: Sequence[str]) -> list[str]:
        """Return the texts that contain no marker token. A text with a marker token cannot consist
        of ordinary tokens.
        """
        return [text for text in texts if not self._cut(text)[1]]

    def _parameter(
        self,
        tool: str,
        name: str,
        schema: Mapping[str, Any],
        root: Mapping[str, Any],
        end: str,
        ends: Sequence[str],
    ) -> str:
        """Return an expression for a value of this schema, followed by the text ``end``.

        Args:
            ends: the texts that end a string value when an answer is read.

        Raises:
            InvalidParameterError: the format cannot write any of the schema's strings, or cannot
                follow the schema.
        """
        if types_of(schema, root) != {"string"}:
            return f"{choice_of(self.spellings(schema, root))} {self.text(end)}"
        found = self._spelled(ends)
        patterns = [pattern_of(each, found) for each in strings_of(tool, name, schema, root)]
        kept = [pattern for pattern in patterns if pattern is not None]
        if not kept:
            raise InvalidParameterError(
                f"tools: the model's format of calls cannot write any string that the schema of "
                f"{tool} allows for {name!r:.40}, because a string ends at {found}",
                "tools",
            )
        pattern = kept[0] if len(kept) == 1 else "|".join(f"({each})" for each in kept)
        return self.until(pattern, end, ends)

    def parameters(
        self,
        tool: str,
        schema: Mapping[str, Any] | None,
        around: Callable[[bool], tuple[str, str]],
        end: str,
        ends: Sequence[str],
    ) -> str:
        """Return an expression for arguments that a format writes one by one.

        Args:
            schema: the schema of the arguments; None allows all arguments.
            around: a function that returns the texts before and after a parameter's name. Its
                argument is true if the parameter's value is a string.
            end: the text after each value.
            ends: the texts that end a string value when an answer is read.

        Raises:
            InvalidParameterError: the format cannot write arguments of this schema.
        """
        found = None if schema is None else parameters_of(tool, schema)
        if found is None or schema is None:
            # A format that does not mark strings has the same expression for strings and for other
            # values.
            values = {around(False): f"{self.json({})} {self.text(end)}"}
            values[around(True)] = self.until(ANY, end, ends)
            each = [
                f"{self.text(before)} {ANY_NAME} {self.text(after)} {value}"
                for (before, after), value in values.items()
            ]
            return f"({' | '.join(each)})*"
        parts = []
        for name, kept, is_required in found:
            before, after = around(types_of(kept, schema) == {"string"})
            value = self._parameter(tool, name, kept, schema, end, ends)
            part = f"{self.text(before + name + after)} {value}"
            parts.append(part if is_required else f"({part})?")
        return " ".join(parts)

    def grammar(self, start: str) -> str:
        """Return the whole grammar, whose first rule is ``start``."""
        return "\n".join([f"start: {start}", *self._rules, ""])


def parameters_of(
    tool: str, root: Mapping[str, Any], not_writable: re.Pattern[str] = _NOT_WRITABLE
) -> list[tuple[str, Mapping[str, Any], bool]] | None:
    """Return (name, schema, is required) of each parameter; None if parameters of any name are
    allowed.

    Args:
        root: the schema of a tool's arguments, which the format writes one by one.
        not_writable: matches a name (without its combining marks) that the format cannot write.

    Raises:
        InvalidParameterError: arguments with these parameters might not match the schema.
    """
    schema = _named(tool, root, root)
    if not isinstance(schema, Mapping) or types_of(schema, root) - {"object"}:
        raise not_by_parameters(tool, "is not the schema of an object")
    if found := sorted(_WHOLE & schema.keys()):
        raise not_by_parameters(tool, f"uses {found[0]} for the arguments as a whole")
    required = schema.get("required")
    names = set(map(str, required)) if isinstance(required, list) else set()
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        if not names and schema.get("additionalProperties", True) is True:
            return None
        properties = {}
    if unknown := sorted(names - properties.keys()):
        raise not_by_parameters(tool, f"requires {unknown[0]!r:.40}, but gives it no schema")
    if not properties and isinstance(schema.get("additionalProperties"), Mapping):
        raise not_by_parameters(tool, "gives its parameters no names")
    if unwritable := [name for name in properties if not_writable.search(without_marks(name))]:
        raise not_by_parameters(tool, f"has the name {unwritable[0]!r:.40}")
    return [
        (name, value if isinstance(value, Mapping) else {}, name in names)
        for name, value in properties.items()
    ]


def _named(tool: str, schema: Any, root: Any) -> Any:
    """Follow the references of an object's schema; return the schema to which they lead.

    Raises:
        InvalidParameterError: a schema has, beside its reference, other keywords that restrict the
            object.
    """
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        if found := sorted((_WHOLE | _OF_PARAMETERS) & schema.keys()):
            raise not_by_parameters(tool, f"has {found[0]} beside a $ref")
        schema = target_of(reference, root)
    return None


def in_lines(call: str, *, several: bool) -> str:
    """Return an expression for one call, or for several calls with a newline between them."""
    return f'{call} ("\\n" {call})*' if several else call


def choice_of(expressions: list[str]) -> str:
    return expressions[0] if len(expressions) == 1 else "(" + " | ".join(expressions) + ")"


def taken_out(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part of ``root`` as a separate schema. Its references still lead to the targets that
    they have in ``root``.
    """
    moved = _moved(schema)
    return schema if moved == schema else {**moved, "$defs": {"root": _moved(root)}}


def _moved(part: Any) -> Any:
    """Return a part of a schema. Its references are changed, because the root has moved to
    ``/$defs/root``.
    """
    if isinstance(part, Mapping):
        return {
            key: f"#/$defs/root{value[1:]}"
            if key == "$ref" and isinstance(value, str) and value[:2] in ("#", "#/")
            else _moved(value)
            for key, value in part.items()
        }
    return [_moved(each) for each in part] if isinstance(part, list) else part


def _escaped(pattern: str) -> str:
    """Return a regular expression in a form that Lark accepts between slashes, on one line."""

    def write(found: re.Match[str]) -> str:
        sign = found.group()
        if sign == "\\":
            raise InvalidParameterError(
                "structured_outputs: a regular expression ends with a backslash",
                "structured_outputs",
            )
        return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(sign, sign)

    return _ESCAPED.sub(write, pattern)


def _any_of(texts: Sequence[str]) -> str:
    return "|".join(_escaped(re.escape(text)) for text in texts)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
