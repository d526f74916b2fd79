"""Converts an answer to content blocks of a message, or to events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from dist_aclgraph.formats.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from dist_aclgraph.serve.openai.chat_deltas import id_of_call

Json = dict[str, Any]


class Blocks:
    """Builds the blocks of one answer, in the order in which the model writes them.

    Attributes:
        blocks: the blocks that are complete.

    Args:
        name: the answer's name, from which the ids of calls and the signatures are made.
    """

    def __init__(self, name: str) -> None:
        self.blocks: list[Json] = []
        self._name = name
        self._open: Json | None = None  # the block that the model writes now
        self._pieces: list[str] = []  # pieces of the open block's text

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def add(self, events: Iterable[Event]) -> Iterator[Json]:
        """Add the answer's next events, and yield the corresponding events of the stream."""
        for event in events:
            if isinstance(event, Content):
                if not self._is_open("text"):
                    yield from self._begin({"type": "text", "text": ""})
                yield self._delta(event.text, {"type": "text_delta", "text": event.text})
            elif isinstance(event, Reasoning):
                if not self._is_open("thinking"):
                    yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                delta = {"type": "thinking_delta", "thinking": event.text}
                yield self._delta(event.text, delta)
            elif isinstance(event, CallBegin):
                call_id = event.call_id or id_of_call(self._name, event.index)
                block = {"type": "tool_use", "id": call_id, "name": event.name, "input": {}}
                yield from self._begin(block)
            elif isinstance(event, CallArguments):
                delta = {"type": "input_json_delta", "partial_json": event.text}
                yield self._delta(event.text, delta)
            elif isinstance(event, CallEnd):
                yield from self.close()

    def close(self) -> Iterator[Json]:
        """Complete the open block, if there is an open block."""
        block = self._open
        if block is None:
            return
        text = "".join(self._pieces)
        if block["type"] == "tool_use":
            block = {**block, "input": _input_of(text)}
        elif block["type"] == "thinking":
            # Some clients drop a block of reasoning that has no signature. Clients send the
            # signature back. The signature proves nothing, and this service does not check
            # signatures.
            signature = id_of_call(self._name, len(self.blocks)).replace("call_", "thought_")
            yield self._delta("", {"type": "signature_delta", "signature": signature})
            block = {**block, "thinking": text, "signature": signature}
        else:
            block = {**block, "text": text}
        yield {"type": "content_block_stop", "index": len(self.blocks)}
        self.blocks.append(block)
        self._open = None

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _begin(self, block: Json) -> Iterator[Json]:
        yield from self.close()
        self._open, self._pieces = block, []
        index = len(self.blocks)
        yield {"type": "content_block_start", "index": index, "content_block": block}

    def _delta(self, text: str, delta: Json) -> Json:
        self._pieces.append(text)
        return {"type": "content_block_delta", "index": len(self.blocks), "delta": delta}


def _input_of(text: str) -> Json:
    """Return a call's arguments. If the text is not a JSON object, return an object with the field
    ``arguments``, which contains the value of the text.
    """
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"arguments": text}
