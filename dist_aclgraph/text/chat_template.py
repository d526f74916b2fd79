"""ChatTemplate: a checkpoint's own template, rendered within bounds of time and size.

It runs in Jinja's immutable sandbox, which bounds neither: a template may loop for hours without a
word, or double a string forty times. So each turn of a loop and each call of a macro looks at the
clock, and what makes strings and lists longer looks at their lengths.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.runtime import Context

from dist_aclgraph.errors import InvalidParameterError, ModelError
from dist_aclgraph.shapes.json_files import read_text

MAX_RENDERED_CHARS = 4 << 20
MAX_RENDER_S = 4.0  # CPU seconds of one thread; what is published takes milliseconds
MAX_BITS = 4096  # of an integer
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """Renders messages. Safe to share between threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template.

        Raises:
            jinja2.TemplateError: it does not compile.
        """
        self._environment = _BoundedEnvironment()
        self._template = self._environment.compile_bounded(source)
        self._special_tokens = special_tokens

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt that the template makes of the messages.

        Raises:
            InvalidParameterError: the template refuses the messages, or cannot render them.
        """
        pieces: list[str] = []
        size = 0
        self._environment.start_clock()
        try:
            for piece in self._template.generate(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=None,
                **self._special_tokens,
            ):
                size += len(piece)
                _check_size(size)
                pieces.append(piece)
        except jinja2.TemplateError as e:
            raise InvalidParameterError(
                f"the chat template refuses the messages: {e}", "messages"
            ) from e
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as e:
            raise InvalidParameterError(
                "the chat template cannot render the messages", "messages"
            ) from e
        return "".join(pieces)


def read_chat_template(directory: Path, described: Mapping[str, Any]) -> ChatTemplate | None:
    """Return the chat template of a checkpoint, None where it has none.

    Args:
        described: what its tokenizer_config.json holds.

    Raises:
        ModelError: the template cannot be read, or does not compile.
    """
    path = directory / "chat_template.jinja"
    source = read_text(path) if path.exists() else described.get("chat_template")
    if isinstance(source, list):  # several named templates; "default" is the chat's
        named = [item for item in source if isinstance(item, dict)]
        source = next((t.get("template") for t in named if t.get("name") == "default"), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(f"the chat template in {directory} is {source!r:.80}; it must be a text")
    try:
        return ChatTemplate(source, _special_tokens(described))
    except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as e:
        raise ModelError(f"the chat template in {directory} does not compile: {e}") from e


class _BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Owns the clock of each thread that renders."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self._clock = threading.local()
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, indent=options.get("indent")
        )
        for name in ("center", "indent", "format", "join", "replace"):
            self.filters[name] = _bounded_filter(self.filters[name])

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile a template that looks at the clock in every loop and macro."""
        tree = self.parse(source)
        for block in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            block.body.insert(0, nodes.ExprStmt(tick))  # type: ignore[attr-defined]
        nodes.Node.set_environment(tree, self)
        return jinja2.Template.from_code(self, self.compile(_without_concat(tree)), self.globals)

    def start_clock(self) -> None:
        self._clock.end_s = time.thread_time() + MAX_RENDER_S

    def tick(self) -> None:
        if time.thread_time() > self._clock.end_s:
            raise jinja2.TemplateRuntimeError(f"it runs for more than {MAX_RENDER_S:g} s")

    def joined(self, *parts: object) -> str:
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        elif operator == "+" and _has_length(left) and _has_length(right):
            _check_size(len(left) + len(right))
        elif operator == "*" and (_has_length(left) or _has_length(right)):
            items, count = (left, right) if _has_length(left) else (right, left)
            _check_size(len(items) * int(count))
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (abs(right) if operator == "**" else 1)
            if bits + (right.bit_length() if operator == "*" else 0) > MAX_BITS:
                raise jinja2.TemplateRuntimeError("it computes with too large integers")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_arguments(args)
        text = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(text, str):
            _check_growth(text, args)
        return super().call(context, obj, *args, **kwargs)


def _without_concat(tree: nodes.Template) -> nodes.Template:
    """Replace ``a ~ b`` by a call that looks at the lengths; the sandbox does not see it."""
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for name, value in parent.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(parent, name, _joined(value))
            elif isinstance(value, list):
                value[:] = [_joined(v) if isinstance(v, nodes.Concat) else v for v in value]
    return tree


def _joined(concat: nodes.Concat) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute("joined"), concat.nodes, [], None, None)
    return call.set_lineno(concat.lineno)  # type: ignore[return-value]


def _bounded_filter(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Check what a filter gets; its marks (whether it wants the context) stay."""

    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_arguments([*args, *kwargs.values()])
        for index, arg in enumerate(args):
            if isinstance(arg, str):
                _check_growth(arg, args[index + 1 :])
        return apply(*args, **kwargs)

    bounded.__dict__.update(apply.__dict__)
    return bounded


def _check_arguments(args: Iterable[Any]) -> None:
    for arg in args:
        if isinstance(arg, int) and abs(arg) > MAX_RENDERED_CHARS:
            raise jinja2.TemplateRuntimeError(f"it asks for {arg!r:.40} of something")
        if isinstance(arg, list | tuple):
            _check_size(sum(len(item) for item in arg if isinstance(item, str)))


def _check_growth(text: str, args: Sequence[Any]) -> None:
    """Bound what a method or filter of a text may make of its arguments."""
    _check_widths(text)
    texts = [len(arg) for arg in args if isinstance(arg, str)]
    items = sum(len(arg) for arg in args if isinstance(arg, list | tuple))
    _check_size(len(text) * (items + 1))
    if len(texts) > 1:  # replace(old, new)
        _check_size((len(text) + 1) * (texts[1] + 1))


def _check_widths(form: str) -> None:
    if "%" in form or "{" in form:
        widths = re.findall(r"[%{:.][^%{}\s]{0,8}?(\d{5,})", form[:MAX_RENDERED_CHARS])
        if widths:
            raise jinja2.TemplateRuntimeError(f"it asks for a width of {widths[0][:20]}")


def _check_size(size: int) -> None:
    if size > MAX_RENDERED_CHARS:
        raise jinja2.TemplateRuntimeError(f"what it makes exceeds {MAX_RENDERED_CHARS} characters")


def _has_length(value: object) -> bool:
    return isinstance(value, str | bytes | list | tuple)


def _special_tokens(described: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens that templates name; older files wrap each in an object."""
    found = {}
    for name in SPECIAL_TOKENS:
        value = described.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
