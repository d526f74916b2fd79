"""Check whether tool calls can be read back from prompts: ``python -m tools.calls_of_templates
DIR...``.

A DIR is a checkpoint with a tokenizer_config.json, or a folder of templates (*.jinja). Each
template renders conversations in which the assistant has called tools. For each template, the
service chooses a format of calls. A model writes calls in the form that its template uses. So the
parser of the chosen format must find the conversation's calls in the rendered turn of the
assistant.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.formats.choice import AnswerFormat, choose_format
from dist_aclgraph.formats.events import CallArguments, CallBegin, CallEnd, Event
from dist_aclgraph.text.chat_template import ChatOptions, ChatTemplate
from tools.compare_templates import read_templates

USER = {"role": "user", "content": "How warm is it?"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "hours": {"type": "array", "items": {"type": "number"}},
        "more": {"type": "object"},
        "is_exact": {"type": "boolean"},
    },
}
SCHEMAS = {"get_weather": PARAMETERS, "stop": {"type": "object", "properties": {}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
Call = tuple[str, Mapping[str, Any]]
CALLS: dict[str, list[Call]] = {
    "one": [("get_weather", {"city": "Zürich"})],
    "kinds": [
        ("get_weather", {"city": "a\nb <b>&amp;", "days": 2, "hours": [1, 2.5], "is_exact": True})
    ],
    "quotes": [("get_weather", {"city": "\"x\" \\ 'y' {", "more": {"k": ["ü", None, False]}})],
    "empty": [("stop", {})],
    "two": [("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Oslo"})],
}
# Texts of tokens that can follow an assistant's turn.
ENDS = (
    *("<|im_end|>", "</s>", "<｜end▁of▁sentence｜>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    *("<|user|>", "<|observation|>", "<|endoftext|>", "[e~[", "<|return|>", "<|eot|>"),
)


def turn(template: ChatTemplate, calls: list[Call], content: str) -> str:
    """Return the assistant's turn as the template writes it.

    Raises:
        InvalidParameterError: the template refuses the conversation.
    """
    written = [
        {
            "id": f"functions.{name}:{i}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for i, (name, arguments) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": content or None, "tool_calls": written}
    asked = template.render([USER], ChatOptions(tools=TOOLS, add_generation_prompt=False))
    head = template.render([USER], ChatOptions(tools=TOOLS)).removeprefix(asked)
    whole = template.render([USER, answer], ChatOptions(tools=TOOLS, add_generation_prompt=False))
    # A template can write more text, such as white space, after the last message.
    pairs = enumerate(zip(asked, whole, strict=False))
    text = whole[next((i for i, (one, other) in pairs if one != other), len(asked)) :]
    # ``head`` may also contain the beginning of a reasoning. If the turn has no reasoning, this
    # beginning is cut off.
    while not text.startswith(head):
        head = head[: max(head.rfind(end, 0, -1) for end in (">", "\n")) + 1]
    text = text.removeprefix(head)
    found = [at for end in ENDS if (at := text.find(end)) >= 0]
    return text[: min(found, default=len(text))]


def calls_in(form: AnswerFormat, text: str) -> list[tuple[str, Any, bool]]:
    """Return (name, arguments, is_whole) for each call that the format's reader finds in a text.

    The markers of calls are read as text here. In the service the markers may be tokens; the tests
    of the formats show that markers in text and marker tokens are read in the same way.
    """
    reader = form.reader(SCHEMAS, is_thinking=False)
    assert reader is not None
    events: list[Event] = []
    for sign in text:
        events += reader.feed(-1, sign)
    events += reader.finish()
    found: list[tuple[str, str, bool]] = []
    for event in events:
        if isinstance(event, CallBegin):
            found.append((event.name, "", False))
        elif isinstance(event, CallArguments):
            name, arguments, _ = found[event.index]
            found[event.index] = (name, arguments + event.text, False)
        elif isinstance(event, CallEnd):
            found[event.index] = (*found[event.index][:2], True)
    return [(name, _decoded(arguments), is_whole) for name, arguments, is_whole in found]


def _decoded(arguments: str) -> Any:
    """Return the arguments of a call, decoded from JSON. If ``arguments`` is not valid JSON, return
    it unchanged.
    """
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def check(template: ChatTemplate, source: str) -> Iterator[tuple[str, str]]:
    """Yield (conversation, problem) for each conversation. The problem is "" if all calls were read
    back.

    Yields nothing if the service knows no format for the template.
    """
    form = choose_format(source, lambda text: None)
    if form.name is None:
        return
    for about, calls in CALLS.items():
        for content in ("", "I look."):
            name = f"{form.name}: {about}{', with text' if content else ''}"
            try:
                text = turn(template, calls, content)
            except DistAclGraphError as e:
                yield name, f"refused: {e}"
                continue
            found = calls_in(form, text)
            is_same = found == [(name, arguments, True) for name, arguments in calls]
            yield name, "" if is_same else f"{text!r} is read as {found}"


def main(directories: list[str]) -> int:
    """Print each problem, and a count. Return 1 if there is a problem; otherwise 0."""
    num_templates = num_read = num_problems = 0
    for directory in directories:
        for name, source, _, template in read_templates(Path(directory)):
            num_templates += 1
            for about, problem in check(template, source):
                num_read += not problem
                num_problems += bool(problem)
                if problem:
                    print(f"{name}: {about}: {problem:.500}")
    print(f"{num_templates} templates: {num_read} turns are read, {num_problems} are not")
    return int(num_problems > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
