"""Grammars of calls, in the language of Lark as llguidance extends it.

A grammar makes the model call tools, and makes the arguments match a schema. Markers that are
tokens are named by their ids, because no text can match them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.formats.one_of import is_any_of
from dist_aclgraph.formats.typed_values import resolve, types_of
from dist_aclgraph.sampling import StructuredOutputs

ANY_OBJECT = {"type": "object"}
JSON_OPTIONS = StructuredOutputs(json_object=True).json_options
ANY_TEXT = r"/(.|\n)*/"
_ESCAPED = re.compile(r"\\.|[/\n]|\\\Z", re.DOTALL)  # an escaped character, "/", a line's end


class Lark:
    """Collects the rules of one grammar.

    Args:
        token_ids: ids of the markers that are tokens.
    """

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        self._rules: list[str] = []
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

    def part(self, name: str) -> None:
        """Name the purpose of the following rules; errors in these rules contain this name."""
        self._rules.append(f"// {name}")

    def json(self, schema: Any, options: Mapping[str, Any] = JSON_OPTIONS) -> str:
        """Return an expression for JSON that matches a schema.

        Args:
            options: see ``StructuredOutputs.json_options``.
        """
        found = {**schema} if isinstance(schema, Mapping) else {} if schema else {"enum": []}
        found["x-guidance"] = {**options, "coerce_one_of": is_any_of(found)}
        return self.rule("%json " + json.dumps(found, ensure_ascii=False))

    def form(self, form: StructuredOutputs) -> str:
        """Return an expression for a text of the required form.

        Raises:
            InvalidParameterError: the form is itself a grammar, or its pattern is no regular
                expression.
        """
        if form.kind == "json":
            return self.json(json.loads(form.text), form.json_options)
        if form.kind == "choice":
            return choice_of([_quoted(text) for text in form.choice or ()])
        if form.kind == "regex":
            return f"/{_escaped(form.text)}/" if form.text else _quoted("")
        raise InvalidParameterError(
            "a grammar cannot be combined with tools, or with this model's reasoning; use a JSON "
            "schema, a regex or a choice",
            "structured_outputs",
        )

    def until(self, pattern: str, end: str) -> str:
        """Return an expression for a text that matches ``pattern``, followed by ``end``."""
        parts = [end] if self._split is None else self._split.split(end)
        if len(parts) == 1:
            return self.rule(f"/{_escaped(pattern)}/", f"[suffix={_quoted(end)}]")
        first, rest = parts[0], end[len(parts[0]) :]
        return f"/({_escaped(pattern)}){_escaped(re.escape(first))}/ {self.text(rest)}"

    def parameter(self, schema: Mapping[str, Any], root: Mapping[str, Any], end: str) -> str:
        """Return an expression for a value of this schema, followed by the text ``end``."""
        if types_of(schema, root) == {"string"}:
            schema = resolve(schema, root)
            values = schema.get("enum", [schema["const"]] if "const" in schema else None)
            if isinstance(values, list):
                return f"{choice_of([self.text(str(value)) for value in values])} {self.text(end)}"
            return self.until(_pattern_of(schema), end)
        return f"{self.json(taken_out(schema, root))} {self.text(end)}"

    def grammar(self, start: str) -> str:
        """Return the whole grammar, whose first rule is ``start``."""
        return "\n".join([f"start: {start}", *self._rules, ""])


def properties_of(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return (name, schema, is required) of each parameter."""
    properties = schema.get("properties")
    required = schema.get("required")
    names = set(required) if isinstance(required, list) else set()
    if not isinstance(properties, Mapping):
        return []
    return [
        (name, value if isinstance(value, Mapping) else {}, name in names)
        for name, value in properties.items()
    ]


def in_lines(call: str, *, several: bool) -> str:
    """Return an expression for one call, or for several calls with a newline between them."""
    return f'{call} ("\\n" {call})*' if several else call


def choice_of(expressions: list[str]) -> str:
    return expressions[0] if len(expressions) == 1 else "(" + " | ".join(expressions) + ")"


def behind_text(expression: str) -> str:
    """Return an expression for any text that is followed by ``expression``.

    The pattern of the text matches as much as possible. So if ``expression`` begins with a quoted
    text, this quoted text becomes a part of the pattern.
    """
    found = re.match(r'("(?:[^"\\]|\\.)*") ', expression)
    if found is None:
        return f"{ANY_TEXT} {expression}"
    first = _escaped(re.escape(json.loads(found.group(1))))
    return f"/(.|\\n)*{first}/ {expression[found.end() :]}"


def taken_out(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part of ``root`` as a separate schema. Its references keep their targets."""
    moved = _moved(schema)
    return schema if moved == schema else {**moved, "$defs": {"root": _moved(root)}}


def _moved(part: Any) -> Any:
    """Return a part of a schema for the place ``/$defs/root``: its references begin there."""
    if isinstance(part, Mapping):
        return {
            key: f"#/$defs/root{value[1:]}"
            if key == "$ref" and isinstance(value, str) and value[:2] in ("#", "#/")
            else _moved(value)
            for key, value in part.items()
        }
    return [_moved(each) for each in part] if isinstance(part, list) else part


def _pattern_of(schema: Mapping[str, Any]) -> str:
    """Return a regular expression of the strings that a schema allows."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        begin = "" if pattern.startswith("^") else r"(.|\n)*"
        end = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else r"(.|\n)*"
        inner = pattern.removeprefix("^")
        return f"{begin}({inner if end else inner[:-1]}){end}"
    least, most = schema.get("minLength"), schema.get("maxLength")
    if isinstance(least, int) or isinstance(most, int):
        return rf"(.|\n){{{least or 0},{'' if most is None else most}}}"
    return r"(.|\n)*"


def _escaped(pattern: str) -> str:
    """Return a regular expression that can stand between slashes, on one line."""

    def write(found: re.Match[str]) -> str:
        sign = found.group()
        if sign == "\\":
            raise InvalidParameterError(
                "structured_outputs: a regular expression ends with a backslash",
                "structured_outputs",
            )
        return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(sign, sign)

    return _ESCAPED.sub(write, pattern)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
