"""The process that renders chat templates for its parent; ``chat_template`` starts it by its path.

The process imports only the standard library and Jinja, so that it starts within 0.1 s and stays
small. Each message on the socket is four bytes of length, followed by JSON. The first message
contains the limits. Each later message contains the template and the variables of one render, and
gets a reply. The process ends when the parent closes the socket, or when a render reaches a limit
of time or memory.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import resource
import signal
import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Any, BinaryIO

if __name__ == "__main__":
    # This process runs an isolated Python (-I -S), so the folders of Jinja and MarkupSafe are
    # added.
    sys.path.extend(sys.argv[1:])

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

LENGTH_BYTES = 4
OUT_OF_MEMORY = 3  # exit code after a render has reached the limit of memory
MAX_ERROR_CHARS = 1000
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# The forms are tried in this order. transformers uses the first form.
FORMS_OF_CALLS: tuple[dict[str, Any], ...] = (
    {},
    {"as_text": True},
    {"has_content": True},
    {"as_text": True, "has_content": True},
    {"has_short_ids": True},
    {"has_short_ids": True, "has_content": True},
)
LENGTH_OF_SHORT_ID = 9  # Mistral's templates require ids of calls with this length
# The mark ends with a space. If this space is missing in the rendered prompt, the template has
# stripped the message.
END_OF_MESSAGE = "CONTINUE-THE-LAST-MESSAGE-HERE "


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text; the tag does not change any text."""

    tags = {"generation"}  # noqa: RUF012  # Jinja declares it so

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


def make_environment() -> jinja2.Environment:
    """Return the Jinja environment in which ``transformers`` renders chat templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON. Unlike Jinja's filter ``tojson``, this function does not escape HTML's special
    characters.
    """
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def receive(stream: BinaryIO) -> Any:
    """Return the next message.

    Raises:
        EOFError: the peer has closed the socket.
    """
    head = stream.read(LENGTH_BYTES)
    body = stream.read(int.from_bytes(head))
    if len(head) < LENGTH_BYTES or len(body) < int.from_bytes(head):
        raise EOFError
    return json.loads(body)


def packed(message: Any) -> bytes:
    """Return the bytes of a message, in the format that ``receive`` reads."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(LENGTH_BYTES) + body


def render(request: dict[str, Any], max_chars: int) -> dict[str, str]:
    """Return the ``text`` of a render, or the ``error`` that ended the render.

    Templates read tools, and calls of tools, in different forms. All forms are tried in order,
    until the template renders one form.
    """
    variables = request["variables"]
    messages = [_with_reasoning(message) for message in variables["messages"]]
    forms = FORMS_OF_CALLS if any(message.get("tool_calls") for message in messages) else ({},)
    replies = []
    for tools in _forms_of_tools(variables.get("tools")):
        variables["tools"] = tools
        for form in forms:
            variables["messages"] = [_with_calls(message, **form) for message in messages]
            replies.append(_render(request, max_chars))
            if "text" in replies[-1]:
                return replies[-1]
    return replies[0]


def _forms_of_tools(tools: list[dict[str, Any]] | None) -> list[list[Any] | None]:
    """Return two lists: the tools in the form of requests, and the functions of these tools."""
    functions = [tool.get("function") for tool in tools or ()]
    return [tools, functions] if functions and all(functions) else [tools]


def _with_calls(
    message: dict[str, Any],
    *,
    as_text: bool = False,
    has_content: bool = False,
    has_short_ids: bool = False,
) -> dict[str, Any]:
    """Return a message whose calls have one of the forms that templates read.

    Args:
        as_text: whether arguments are JSON text, and not an object.
        has_content: whether an empty content is added to a message that has only calls.
        has_short_ids: whether each id of a call is replaced by an id of nine characters, in the
            call and in the message with its result.
    """
    found, calls = {**message}, message.get("tool_calls")
    if has_short_ids and (call_id := message.get("tool_call_id")) is not None:
        found["tool_call_id"] = _short_id(call_id)
    if not calls:
        return found
    if has_content and found.get("content") is None:
        found["content"] = ""
    if has_short_ids:
        found["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in calls]
    if as_text:
        found["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _text_of(call)}}
            for call in calls
        ]
    return found


def _short_id(call_id: Any) -> str:
    """Return an id of letters and digits; equal ids stay equal."""
    text = str(call_id)
    if len(text) == LENGTH_OF_SHORT_ID and text.isalnum():
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH_OF_SHORT_ID]


def _text_of(call: dict[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _render(request: dict[str, Any], max_chars: int) -> dict[str, str]:
    variables = request["variables"]
    try:
        last = _mark_end(variables["messages"]) if request["continues"] else None
        text = _joined(_compile(request["template"]).generate(variables), max_chars)
        return {"text": text if last is None else _until_mark(text, last)}
    except MemoryError:
        raise
    except jinja2.TemplateError as e:
        return {"error": f"the chat template refuses the messages: {e!s:.{MAX_ERROR_CHARS}}"}
    except Exception as e:
        found = f"{type(e).__name__}: {e!s:.{MAX_ERROR_CHARS}}"
        return {"error": f"the chat template cannot render the messages: {found}"}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message that has the reasoning under each key that templates read."""
    found = [message[name] for name in REASONING_FIELDS if message.get(name) is not None]
    if not found:
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Put a mark after the last text of the last message; return the text without the mark."""
    holder, key = messages[-1], "content"
    if isinstance(holder.get(key), list):
        parts = [part for part in holder[key] if isinstance(part, dict) and "text" in part]
        holder, key = (parts or [{}])[-1], "text"
    last = holder.get(key)
    if not isinstance(last, str):
        raise jinja2.TemplateError("the last message has no text that could be continued")
    holder[key] = last + END_OF_MESSAGE
    return last


def _until_mark(text: str, last: str) -> str:
    place = text.rfind(END_OF_MESSAGE.strip())
    if place < 0 or last.strip() not in text:
        raise jinja2.TemplateError("it leaves out the end of the last message")
    is_stripped = not text.startswith(END_OF_MESSAGE, place)
    # If a template writes the last message several times, each copy has the mark.
    text = text[:place].replace(END_OF_MESSAGE, "").replace(END_OF_MESSAGE.strip(), "")
    return text.rstrip() if is_stripped else text


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    return make_environment().from_string(source)


def _joined(pieces: Iterable[str], max_chars: int) -> str:
    taken = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > max_chars:
            raise jinja2.TemplateRuntimeError(
                f"the prompt would have more than {max_chars} characters; send shorter messages"
            )
        taken.append(piece)
    return "".join(taken)


def main() -> None:
    """Render until the parent closes the socket. Standard input and output are this socket."""
    # This process ignores Ctrl-C, because its parent may still drain requests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    first = receive(incoming)
    resource.setrlimit(resource.RLIMIT_AS, (first["memory_bytes"],) * 2)
    while True:
        request = receive(incoming)
        # The kernel ends the process by SIGPROF; no code of a template can delay this signal.
        signal.setitimer(signal.ITIMER_PROF, first["cpu_s"])
        reply = packed(render(request, first["chars"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        outgoing.write(reply)
        outgoing.flush()


if __name__ == "__main__":
    try:
        main()
    except EOFError:
        pass
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
