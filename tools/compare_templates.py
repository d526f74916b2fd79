"""Compare our prompts with those of transformers: ``python -m tools.compare_templates DIR...``.

A DIR is a checkpoint with a tokenizer_config.json, or a folder of templates (*.jinja). Each
template renders the conversations in this file with each set of options. Two results count as equal
if the texts are equal, or if both programs refuse the conversation.

transformers passes the content of a message to the template unchanged. The runtime passes a list of
parts to a template that reads parts, and a single text to any other template. So the prompt of
transformers is rendered with both forms of contents. The reference is the first of these prompts
that contains the texts of all user messages.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.shapes.json_files import read_json_object
from dist_aclgraph.text.added_tokens import read_added_tokens
from dist_aclgraph.text.chat_template import ChatOptions, ChatTemplate, read_chat_template

USER = {"role": "user", "content": '  How warm is it in Zürich & "München"? <b>🙂\n'}
SYSTEM = {"role": "system", "content": "Answer in <one> word."}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nWarm. "}
ARGUMENTS = {"city": "Zürich", "days": 1, "units": ["°C", None, True]}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"id": "call00001", **CALL}]}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": '{"t": 9}'}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A <city>"},
        "days": {"type": "integer", "enum": [1, 2]},
        "units": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
}
DESCRIBED = {"name": "get_weather", "description": "The weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": DESCRIBED}]
DOCUMENTS = [{"doc_id": 1, "title": "One", "text": "Zürich: 9 °C", "contents": "Zürich"}]
TWO_PARTS = [{"type": "text", "text": "First."}, {"type": "text", "text": "Second."}]
REASONED = {"role": "assistant", "content": "Warm.", "reasoning_content": "It is June."}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER, ANSWER, USER],
    "developer": [{**SYSTEM, "role": "developer"}, USER],
    "names": [{**USER, "name": "ann"}, {**ANSWER, "name": "bot"}, USER],
    "reasoning": [USER, REASONED, USER],
    "calls": [SYSTEM, USER, CALLS, RESULT],
    "called": [USER, {**CALLS, "content": "I look."}, RESULT, ANSWER, USER],
    "reasoned calls": [USER, {**CALLS, "reasoning": "I must look."}, RESULT],
    "parts": [USER, ANSWER, {"role": "user", "content": TWO_PARTS}],
    "null": [USER, {"role": "assistant", "content": None, "tool_calls": None, "name": None}, USER],
    "unknown keys": [{**USER, "weight": 1, "prefix": True}],
    "odd order": [ANSWER, USER, USER, SYSTEM],
    "answer last": [SYSTEM, USER, ANSWER],
    "reasoned answer last": [USER, REASONED],
    "parts last": [USER, {"role": "assistant", "content": TWO_PARTS}],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "prompt": {"add_generation_prompt": True},
    "no prompt": {},
    "continued": {"continue_final_message": True},
    "no thinking": {"add_generation_prompt": True, "enable_thinking": False},
    "thinking": {"add_generation_prompt": True, "enable_thinking": True, "thinking": True},
    "tools": {"add_generation_prompt": True, "tools": TOOLS},
    "documents": {"add_generation_prompt": True, "documents": DOCUMENTS},
    "effort": {"add_generation_prompt": True, "reasoning_effort": "high", "tools": TOOLS},
}
TEXTS = ("How warm is it", "First.", "Second.")  # texts in users' messages
# If a template expects a text but gets a list of parts, it prints the list. Then the prompt
# contains one of PRINTED_PARTS.
PRINTED_PARTS = ("'type': 'text'", '"type": "text"')
# transformers does not remove LEFT_MARK from a prompt that contains the last message twice.
NONE_TEST = re.compile(r"content['\"\])]*\s+is\s+(not\s+)?none", re.IGNORECASE)
LEFT_MARK = "CONTINUE_FINAL_MESSAGE_TAG"
NAMED = ("add_generation_prompt", "continue_final_message", "tools", "documents")


def read_templates(directory: Path) -> Iterator[tuple[str, str, dict[str, str], ChatTemplate]]:
    """For each template in a folder, yield its name, its source, its special tokens, and the
    compiled template.
    """
    described = directory / "tokenizer_config.json"
    if described.exists():
        config = read_json_object(described)
        special = read_added_tokens(directory, config, ()).by_name
        template = read_chat_template(directory, config, special)
        for name, source in (template.sources if template else {}).items():
            yield f"{directory}:{name}", source, special, ChatTemplate({"default": source}, special)
        return
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    for path in sorted(directory.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        try:
            yield path.stem, source, special, ChatTemplate({"default": source}, special)
        except jinja2.TemplateError as e:
            print(f"{path}: {e}")


def theirs(
    source: str, special: Mapping[str, str], chat: list[dict[str, Any]], options: dict[str, Any]
) -> str | None:
    """Return the prompt of transformers; None if it refuses the conversation."""
    tests_none = NONE_TEST.search(source) is not None
    chat = [
        {
            key: value
            for key, value in m.items()
            if value is not None or (tests_none and key == "content" and m.get("tool_calls"))
        }
        for m in chat
    ]
    if "developer" not in source:  # most templates have no role "developer"
        chat = [{**m, "role": m["role"].replace("developer", "system")} for m in chat]
    try:
        (text,), _ = render_jinja_template([chat], chat_template=source, **{**special, **options})
    except Exception:  # a template can raise any error
        return None
    return str(text)


def ours(
    template: ChatTemplate, chat: list[dict[str, Any]], options: dict[str, Any]
) -> tuple[str | None, str]:
    """Return our prompt and "", or None and the error."""
    named = {"add_generation_prompt": False} | {k: options[k] for k in NAMED if k in options}
    variables = {key: value for key, value in options.items() if key not in NAMED}
    try:
        return template.render(chat, ChatOptions(**named, variables=variables)), ""
    except DistAclGraphError as e:
        return None, str(e)


def forms(chat: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield a conversation in all forms: with unchanged contents, with contents as texts, and with
    contents as parts.

    Each form is yielded twice: with the arguments of calls as objects, and with these arguments as
    JSON texts. Then all forms are yielded again, with "" as the content of messages that have calls
    but no content.
    """
    filled = [{**m, "content": m.get("content") or ""} if m.get("tool_calls") else m for m in chat]
    for each in (chat, filled):
        for found in forms_of_contents(each):
            yield found
        for found in forms_of_contents(each):
            yield [with_texts(message) for message in found]


def with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in which the arguments of calls are JSON texts."""
    if not message.get("tool_calls"):
        return message
    text = json.dumps(ARGUMENTS, ensure_ascii=False)
    calls = [{**c, "function": {**c["function"], "arguments": text}} for c in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def forms_of_contents(chat: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield a conversation unchanged, with contents as texts, and with contents as parts."""
    yield chat
    for is_parts in (False, True):
        found = []
        for message in chat:
            content = message.get("content")
            if isinstance(content, list) and not is_parts:
                content = "\n".join(part["text"] for part in content)
            elif isinstance(content, str) and is_parts:
                content = [{"type": "text", "text": content}]
            found.append({**message, "content": content})
        yield found


def reference(
    source: str, special: Mapping[str, str], chat: list[dict[str, Any]], options: dict[str, Any]
) -> str | None:
    """Let transformers render all forms of a conversation. Return the first prompt that contains
    all texts.
    """
    sent = str(chat)
    wanted = [text for text in TEXTS if text in sent]
    prompts = [theirs(source, special, form, options) for form in forms(chat)]
    for prompt in filter(None, prompts):
        is_printed = any(form in prompt for form in PRINTED_PARTS)
        if not is_printed and all(text in prompt for text in wanted):
            return prompt.replace(LEFT_MARK + " ", "").replace(LEFT_MARK, "")
    return prompts[0]


def main(directories: list[str]) -> int:
    """Print each difference, and a count. Return 1 if there is a difference; otherwise 0."""
    num_equal = num_refused = num_different = num_templates = 0
    for directory in directories:
        for name, source, special, template in read_templates(Path(directory)):
            num_templates += 1
            for about, chat in CONVERSATIONS.items():
                for setting, options in OPTIONS.items():
                    expected = reference(source, special, chat, options)
                    found, error = ours(template, chat, options)
                    num_equal += found == expected is not None
                    num_refused += found is None is expected
                    if found != expected:
                        num_different += 1
                        print(f"{name}: {about}, {setting}: {error}\n  {expected!r}\n  {found!r}")
    print(
        f"{num_templates} templates: {num_equal} prompts are equal, both sides refuse "
        f"{num_refused}, {num_different} are different"
    )
    return min(num_different, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
