"""Measures the CPU time that the ingress needs for the text of a token, with and without a reader
that finds tool calls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from benchmarks.common.report import Table
from dist_aclgraph.formats.choice import FORMATS, AnswerFormat
from dist_aclgraph.formats.scanner import Reader
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.serve.openai.chat_deltas import delta_of
from dist_aclgraph.text.output import OutputText
from dist_aclgraph.text.tokenizer import Tokenizer

SENTENCE = "The train to the north leaves at 9:45, and it has a restaurant (with 30 seats). "
TOOLS: dict[str, Any] = {
    "find": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
}
ROUNDS = 25
_json = msgspec.json.Encoder()


def measure_text(tokenizer: Tokenizer, sentences: int = 8) -> list[dict[str, Any]]:
    """Return the CPU times per token in microseconds, for each format of tool calls.

    A ``Reader`` finds tool calls in an answer. There are three times: for content without a reader,
    for content with a reader, and for the arguments of a call. Each time includes the conversion of
    the token to text, the work of the reader, and the JSON of the chunk. The times do not include
    the engine's messages and HTTP, because these do not depend on the reader.
    """
    content = tokenizer.encode(SENTENCE * sentences, add_special_tokens=False)
    rows = []
    for name in FORMATS:
        form = AnswerFormat(name, None, {})
        head = "<|channel|>final<|message|>" if form.has_channels else ""
        said = tokenizer.encode(head, add_special_tokens=False) + content
        called = tokenizer.encode(call_of(name, SENTENCE * sentences), add_special_tokens=False)

        def reader(form: AnswerFormat = form) -> Reader | None:
            return form.reader(TOOLS, is_thinking=False)

        each: list[tuple[list[int], Callable[[], Reader | None]]] = [
            (content, lambda: None),
            (said, reader),
            (called, reader),
        ]
        # The variants take turns. The result of a variant is its fastest turn.
        found = [[_us(tokenizer, ids, make) for ids, make in each] for _ in range(ROUNDS)]
        free, text, call = np.min(np.array(found), axis=0).tolist()
        rows.append({"format": name, "free": free, "content": text, "call": call})
    return rows


def text_table(rows: Sequence[dict[str, Any]]) -> Table:
    return Table(
        "CPU time of the ingress for the text of a token, without messages and HTTP",
        ["format", "no reader, us", "content, us", "added", "arguments, us", "added"],
        [
            [
                row["format"],
                f"{row['free']:.1f}",
                *(
                    cell
                    for name in ("content", "call")
                    for cell in (f"{row[name]:.1f}", f"{row[name] - row['free']:.1f}")
                ),
            ]
            for row in rows
        ],
    )


def _us(tokenizer: Tokenizer, ids: Sequence[int], make: Callable[[], Reader | None]) -> float:
    output = OutputText(tokenizer, [], SamplingParams(max_tokens=len(ids) + 1), make())
    begin_s = time.thread_time()
    for token in ids:
        piece = output.add_tokens([token], (), None)
        delta = {"content": piece.text} if piece.text else {}
        if piece.events:
            delta = delta_of(piece.events, "name")
        _json.encode({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None})
    return (time.thread_time() - begin_s) * 1e6 / len(ids)


def call_of(name: str, text: str) -> str:
    """Return a tool call with one text argument, in the syntax of the format ``name``."""
    value = json.dumps({"text": text})
    return {
        "gpt_oss": f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{value}",
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0"
        f"<|tool_call_argument_begin|>{value}<|tool_call_end|>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="find">\n'
        f'<parameter name="text">{text}</parameter>\n</invoke>',
        "hy_v3": "<tool_calls>\n<tool_call>find<tool_sep>\n<arg_key>text</arg_key>\n"
        f"<arg_value>{text}</arg_value>\n</tool_call>\n</tool_calls>",
        "glm4": f"find\n{value}",
        "phi4_mini_json": f'<|tool_call|>[{{"name": "find", "arguments": {value}}}]<|/tool_call|>',
        "apertus": f'<|tools_prefix|>[{{"find": {value}}}]<|tools_suffix|>',
        "mistral": f'[TOOL_CALLS][{{"name": "find", "arguments": {value}}}]',
        "granite": f'<|tool_call|>[{{"name": "find", "arguments": {value}}}]',
        "seed_oss": "<seed:tool_call>\n<function=find>\n"
        f"<parameter=text>{text}</parameter>\n</function>\n</seed:tool_call>",
        "cohere2": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "find", '
        f'"parameters": {value}}}\n]<|END_ACTION|>',
        "hunyuan": f"<tool_calls><tool_call>find\n```json\n{value}\n```</tool_call>",
        "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="find">\n'
        f'<｜DSML｜parameter name="text" string="true">{text}</｜DSML｜parameter>\n',
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n"
        f"```json\n{value}\n```<｜tool▁call▁end｜>",
        "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>"
        f"{value}<｜tool▁call▁end｜>",
        "glm45": f"<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>{text}</arg_value>\n",
        "qwen3_coder": "<tool_call>\n<function=find>\n<parameter=text>\n"
        f"{text}\n</parameter>\n</function>\n</tool_call>",
        "hermes": f'<tool_call>\n{{"name": "find", "arguments": {value}}}\n</tool_call>',
        "olmo3": f"<function_calls>\nfind(text={json.dumps(text)})\n</function_calls>",
        "pythonic": f"[find(text={json.dumps(text)})]",
        "llama3_json": f'{{"name": "find", "parameters": {value}}}',
    }[name]
