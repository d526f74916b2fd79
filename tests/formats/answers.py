"""Answers in the formats of model families, and the messages that a reader must make of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dist_aclgraph.formats.choice import FORMATS, AnswerFormat
from dist_aclgraph.formats.events import CallArguments, CallBegin, CallEnd, Content, Event
from dist_aclgraph.formats.reasoning import Thought

THINK = Thought("<think>", "</think>")
TOOLS = {
    "find": {
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "text": {"type": "string"},
            "deep": {"type": ["boolean", "null"]},
            "more": {"$ref": "#/$defs/more"},
            "word": {"type": ["string", "null"]},
        },
        "$defs": {"more": {"type": "object"}},
    },
    "stop": {},
}
FOUND = ("find", '{"n": 1, "text": "a\\"}{\\n ü", "more": {"k": [1, 2]}}', True)
STOPPED = ("stop", "{}", True)
TEXTS = ("find", '{"n": 5, "text": "two\\nlines </b> 2>&1", "deep": true}', True)
JSON = FOUND[1]


@dataclass
class Message:
    """The message of an answer: its content, its reasoning, and (name, arguments, is_complete) of
    each call.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, bool]] = field(default_factory=list)


# Complete answers with two calls, and their messages.
ANSWERS: dict[str, tuple[str, Message]] = {
    "hermes": (
        f'I look.\n<tool_call>\n{{"name": "find", "arguments": {JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        Message("I look.", calls=[FOUND, STOPPED]),
    ),
    "qwen3_coder": (
        "I look.\n<tool_call>\n<function=find>\n<parameter=n>\n5\n</parameter>\n"
        "<parameter=text>\ntwo\nlines </b> 2>&1\n</parameter>\n<parameter=deep>\nTrue\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=stop>\n</function>\n"
        "</tool_call>",
        Message("I look.", calls=[TEXTS, STOPPED]),
    ),
    "glm45": (
        "\n<tool_call>find\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n<arg_key>text</arg_key>"
        "\n<arg_value>two\nlines </b> 2>&1</arg_value>\n<arg_key>deep</arg_key>\n<arg_value>true"
        "</arg_value>\n</tool_call>\n<tool_call>stop\n</tool_call>",
        Message(calls=[TEXTS, STOPPED]),
    ),
    "glm4": (
        f"\nI look.<|assistant|>find\n{JSON}<|assistant|>stop\n{{}}",
        Message("\nI look.", calls=[FOUND, STOPPED]),
    ),
    "hy_v3": (
        "I look.<tool_calls:opensource>\n<tool_call:opensource>find<tool_sep:opensource>\n"
        "<arg_key:opensource>n</arg_key:opensource>\n<arg_value:opensource>5"
        "</arg_value:opensource>\n<arg_key:opensource>text</arg_key:opensource>\n"
        "<arg_value:opensource>two\nlines </b> 2>&1</arg_value:opensource>\n"
        "<arg_key:opensource>deep</arg_key:opensource>\n<arg_value:opensource>true"
        "</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>stop"
        "<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
        Message("I look.", calls=[TEXTS, STOPPED]),
    ),
    "mistral": (
        f'I look.[TOOL_CALLS][{{"name": "find", "arguments": {JSON}, "id": "aB3dE5gH7"}}, '
        '{"name": "stop", "arguments": {}}]',
        Message("I look.", calls=[FOUND, STOPPED]),
    ),
    "phi4_mini_json": (
        f'I look.<|tool_call|>[{{"name": "find", "arguments": {JSON}}}, '
        '{"name": "stop", "arguments": {}}]<|/tool_call|>',
        Message("I look.", calls=[FOUND, STOPPED]),
    ),
    "granite": (
        f'I look.<|tool_call|>[{{"name": "find", "arguments": {JSON}}}, '
        '{"name": "stop", "arguments": {}}]',
        Message("I look.", calls=[FOUND, STOPPED]),
    ),
    "cohere2": (
        "<|START_RESPONSE|>I look.<|END_RESPONSE|><|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "find", "parameters": {JSON}}},\n'
        '    {"tool_call_id": "1", "tool_name": "stop", "parameters": {}}\n]<|END_ACTION|>',
        Message("I look.", calls=[FOUND, STOPPED]),
    ),
    "apertus": (
        f'I look.<|tools_prefix|>[{{"find": {JSON}}}, {{"stop": {{}}}}]<|tools_suffix|>',
        Message("I look.", calls=[FOUND, STOPPED]),
    ),
    "hunyuan": (
        f"<answer>\nI look.\n<tool_calls><tool_call>find\n```json\n{JSON}\n```</tool_call>\n"
        "<tool_call>stop\n```json\n{}\n```</tool_call></tool_calls>\n</answer>",
        Message("I look.", calls=[FOUND, STOPPED]),
    ),
    "seed_oss": (
        "I look.\n<seed:tool_call>\n<function=find>\n<parameter=n>5</parameter>\n"
        "<parameter=text>two\nlines </b> 2>&1</parameter>\n<parameter=deep>true</parameter>\n"
        "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=stop>\n</function>\n"
        "</seed:tool_call>",
        Message("I look.", calls=[TEXTS, STOPPED]),
    ),
    "deepseek_v3": (
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n"
        f"{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Message("I look.", calls=[FOUND, STOPPED]),
    ),
    "deepseek_v31": (
        f"I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{JSON}"
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        Message("I look.", calls=[FOUND, STOPPED]),
    ),
    "deepseek_v32": (
        'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="find">\n'
        '<｜DSML｜parameter name="n" string="false">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="text" string="true">two\nlines </b> 2>&1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="deep" string="false">true</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        Message("I look.", calls=[TEXTS, STOPPED]),
    ),
    "minimax_m2": (
        'I look.\n<minimax:tool_call>\n<invoke name="find">\n<parameter name="n">5</parameter>\n'
        '<parameter name="text">two\nlines </b> 2>&1</parameter>\n'
        '<parameter name="deep">true</parameter>\n</invoke>\n<invoke name="stop">\n</invoke>\n'
        "</minimax:tool_call>",
        Message("I look.", calls=[TEXTS, STOPPED]),
    ),
    "kimi_k2": (
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_call_begin|>functions.stop:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        Message("I look.", calls=[FOUND, STOPPED]),
    ),
    "llama3_json": (
        f'<|python_tag|>{{"name": "find", "parameters": {JSON}}}; '
        '{"type": "function", "name": "stop", "parameters": {}}',
        Message(calls=[FOUND, STOPPED]),
    ),
    "pythonic": (
        '[find(n=5, text="two\\nlines </b> 2>&1", deep=True), stop()]',
        Message(calls=[TEXTS, STOPPED]),
    ),
    "olmo3": (
        "I look.\n<function_calls>\nfind(n=5, text='two\\nlines </b> 2>&1', deep=true)\n"
        "stop()\n</function_calls>",
        Message("I look.", calls=[TEXTS, STOPPED]),
    ),
    "gpt_oss": (
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.find <|constrain|>json<|message|>{JSON}<|call|><|start|>assistant "
        "to=functions.stop<|channel|>commentary json<|message|>{}<|call|>",
        Message("", "I look.", calls=[FOUND, STOPPED]),
    ),
}


def make_format(name: str | None, *, has_tokens: bool, thought: Thought | None = None):
    """Return a format. If ``has_tokens``, each marker is a single token; otherwise, no marker is a
    single token.
    """
    markers = {*(() if name is None else FORMATS[name].MARKERS)}
    markers |= set() if thought is None else {thought.begin, thought.end}
    ids = {marker: 1000 + i for i, marker in enumerate(sorted(markers))}
    return AnswerFormat(name, thought, ids if has_tokens else {})


def as_tokens(text: str, ids: dict[str, int], sizes: Iterator[int]) -> Iterable[tuple[int, str]]:
    """Divide a text into tokens: markers keep their ids, and the other text is cut into pieces of
    ``sizes``.
    """
    pattern = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
    for part in re.split(f"({pattern})", text) if ids else [text]:
        if part in ids:
            yield ids[part], part
            continue
        begin = 0
        while begin < len(part):
            end = begin + next(sizes)
            yield 0, part[begin:end]
            begin = end


def folded(events: Iterable[Event]) -> Message:
    """Return the message that results from all events."""
    message = Message()
    for event in events:
        if isinstance(event, Content):
            message.content += event.text
        elif isinstance(event, CallBegin):
            message.calls.append((event.name, "", False))
        elif isinstance(event, CallArguments):
            name, arguments, _ = message.calls[event.index]
            message.calls[event.index] = (name, arguments + event.text, False)
        elif isinstance(event, CallEnd):
            message.calls[event.index] = (*message.calls[event.index][:2], True)
        else:
            message.reasoning += event.text
    return message
