"""The page of all configuration keys: meaning, type, limits and default of each key."""

from __future__ import annotations

import textwrap
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import pydantic
from pydantic.fields import FieldInfo

from dist_aclgraph.config import Config, Section
from dist_aclgraph.vllm_options import HARMLESS, OPTIONS, REFUSED, SAME

INTRODUCTION = """\
# Configuration

One YAML file describes one deployment. This page lists every key; other keys are refused. On the
command line, `key=value` replaces the value of the file: `parallel.tp=2`. Such a value is JSON or
YAML. The command `dist-aclgraph keys > docs/use/configuration.md` makes this page.
"""
OF_VLLM = """\
## Options of vLLM

`dist-aclgraph serve MODEL` takes these options of `vllm serve`, and `LLM(MODEL, ...)` takes them as
arguments. `run` and `plan` take the same options, except the options of the HTTP service.
`key=value` goes before an option. As with vLLM, a name may have underscores in place of hyphens, an
integer may have a unit (`1k` is 1000, `1K` is 1024), and a part of a mapping may be an option:
`--compilation-config.cudagraph_mode NONE`.

| vLLM | here |
| --- | --- |
"""
REFUSED_HEAD = """
These options have no counterpart. They are refused, unless their value asks for what the service
does in any case; then they have no effect.

| vLLM | value without effect | instead of other values |
| --- | --- | --- |
"""
MAX_COLUMNS = 118


def render_keys() -> str:
    """Return the page, in Markdown: first the keys that are in no section, then a list for each
    section.
    """
    options = OF_VLLM + "".join(f"| {flags} | {ours} |\n" for flags, ours in _options())
    refused = "".join(
        f"| `{_flag(name)}` | {_harmless(name)} | {why} |\n" for name, why in REFUSED.items()
    )
    return "\n".join([INTRODUCTION, *_render(Config, ""), options + REFUSED_HEAD + refused])


# The page lists at most four renamed values of an option. If an option has more renamed values, the
# page shows only the option's note.
MAX_WORDS = 4


def _options() -> Iterator[tuple[str, str]]:
    """Yield two texts for each option of vLLM. The first text lists the option's flags. The second
    text has this package's key, this package's names for values with another name in vLLM, and the
    option's note.
    """
    for name, option in OPTIONS.items():
        flags = ", ".join(f"`{_flag(each)}`" for each in (name, *option.short))
        words = [
            f"{_literal(theirs)} is {'the default' if ours is None else ours}"
            for theirs, ours in option.words.items()
        ]
        if len(words) > MAX_WORDS:
            words = []
        if option.note:
            words.append(option.note)
        yield flags, f"`{option.key}`" + (f": {', '.join(words)}" if words else "")


def _harmless(name: str) -> str:
    values = HARMLESS.get(name, ())
    if isinstance(values, range):
        return f"{values[0]} to {values[-1]}"
    shown = sorted({f"`{_literal(value)}`".replace(".0", "") for value in values})
    return ", ".join([*shown, *([f"that of `{SAME[name]}`"] if name in SAME else [])])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _render(section: type[Section], prefix: str) -> Iterator[str]:
    inner: list[tuple[str, type[Section]]] = []
    items = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            inner.append((f"{prefix}{name}", field.annotation))
        else:
            items.append(_item(name, field))
    yield f"## {prefix.rstrip('.') or 'At the top'}\n"
    yield f"{' '.join((section.__doc__ or '').split())}\n"
    if items:
        yield from items
        yield ""
    for name, found in inner:
        yield from _render(found, f"{name}.")


def _item(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else _default(field)
    limits = _limits(field)
    kind = _type(field.annotation) + (f", {limits}" if limits else "")
    return textwrap.fill(
        f"- **`{name}`** ({kind}; {default}): {field.description}",
        MAX_COLUMNS,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _default(field: FieldInfo) -> str:
    return f"default `{_literal(field.get_default(call_default_factory=True))}`"


def _limits(field: FieldInfo) -> str:
    words = []
    for limit in field.metadata:
        if isinstance(limit, annotated_types.Ge):
            words.append(f">= {limit.ge}")
        elif isinstance(limit, annotated_types.Gt):
            words.append(f"> {limit.gt}")
        elif isinstance(limit, annotated_types.Le):
            words.append(f"<= {limit.le}")
        elif isinstance(limit, annotated_types.Lt):
            words.append(f"< {limit.lt}")
        elif isinstance(limit, annotated_types.MultipleOf):
            words.append(f"a multiple of {limit.multiple_of}")
    return ", ".join(words)


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{_literal(value)}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"map of {_type(arguments[0])} to {_type(arguments[1])}"
    if annotation is type(None):
        return "null"
    if annotation is pydantic.JsonValue:
        return "values of JSON"
    return {bool: "true or false", int: "integer", float: "number", str: "text"}[annotation]


def _literal(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | dict):
        return "[]" if isinstance(value, tuple) and not value else str(value).replace("()", "[]")
    return str(value) if value != "" else '""'
