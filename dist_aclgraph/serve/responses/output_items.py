"""Converts an answer to items of a response, or to events of a stream."""

from __future__ import annotations

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
from dist_aclgraph.serve.responses.input import Namespaces, encode_reasoning

Json = dict[str, Any]


class OutputItems:
    """Builds the items of one answer, in the order in which the model writes them.

    Events are yielded without sequence numbers.

    Attributes:
        items: the items that are complete.

    Args:
        name: the name of the answer, from which the items' ids are made.
        namespaces: maps the name by which the model calls a function to the function's namespace
            and name.
        encodes_reasoning: whether items of reasoning have a second copy of their text in
            ``encrypted_content``.
    """

    def __init__(
        self, name: str, namespaces: Namespaces, *, encodes_reasoning: bool = False
    ) -> None:
        self._namespaces = namespaces
        self._encodes_reasoning = encodes_reasoning
        self.items: list[Json] = []
        self._name = name
        self._open: Json | None = None  # the item that the model writes now
        self._pieces: list[str] = []  # text of the open item
        self._logprobs: list[Json] = []  # log-probabilities of the open item

    def add(self, events: Iterable[Event], logprobs: list[Json]) -> Iterator[Json]:
        """Add events of one piece.

        Args:
            logprobs: log-probabilities of the piece's tokens. They are added to the last
                ``Content`` in ``events``.
        """
        found = list(events)
        last = max((i for i, e in enumerate(found) if isinstance(e, Content)), default=-1)
        for i, event in enumerate(found):
            if isinstance(event, Content):
                rows = logprobs if i == last else []
                yield from self._add_text("message", event.text, rows)
            elif isinstance(event, Reasoning):
                yield from self._add_text("reasoning", event.text, [])
            elif isinstance(event, CallBegin):
                yield from self._begin_call(event)
            elif isinstance(event, CallArguments):
                self._pieces.append(event.text)
                yield self._event(
                    "response.function_call_arguments.delta", delta=event.text, has_part=False
                )
            elif isinstance(event, CallEnd):
                yield from self.close()

    def close(self, status: str = "completed") -> Iterator[Json]:
        """Complete the open item, if there is an open item."""
        item = self._open
        if item is None:
            return
        text = "".join(self._pieces)
        if item["type"] == "function_call":
            item = {**item, "arguments": text, "status": status}
            yield self._event(
                "response.function_call_arguments.done",
                has_part=False,
                name=item["name"],
                arguments=text,
            )
        else:
            kind = _text_type(item)
            part = _part(kind, text, self._logprobs)
            item = {**item, "content": [part], "status": status}
            if item["type"] == "reasoning" and self._encodes_reasoning:
                item["encrypted_content"] = encode_reasoning(text)
            more: Json = {"logprobs": self._logprobs} if kind == "output_text" else {}
            yield self._event(f"response.{kind}.done", text=text, **more)
            yield self._event("response.content_part.done", part=part)
        yield {
            "type": "response.output_item.done",
            "output_index": len(self.items),
            "item": item,
        }
        self.items.append(item)
        self._open = None

    def end(self, status: str) -> Iterator[Json]:
        """Complete the answer. If the answer has neither a message nor a call, add an empty
        message.
        """
        yield from self.close(status)
        if status == "completed" and all(item["type"] == "reasoning" for item in self.items):
            yield from self._begin_text("message")
            yield from self.close()

    def _add_text(self, kind: str, text: str, logprobs: list[Json]) -> Iterator[Json]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin_text(kind)
        assert self._open is not None
        self._pieces.append(text)
        self._logprobs += logprobs
        name = _text_type(self._open)
        more: Json = {"logprobs": logprobs} if name == "output_text" else {}
        yield self._event(f"response.{name}.delta", delta=text, **more)

    def _begin_text(self, kind: str) -> Iterator[Json]:
        if kind == "message":
            item: Json = {"type": "message", "role": "assistant", "content": []}
        else:
            item = {"type": "reasoning", "summary": [], "content": [], "encrypted_content": None}
        yield from self._begin(item, "msg" if kind == "message" else "rs")
        part = _part(_text_type(item), "", [])
        yield self._event("response.content_part.added", part=part)

    def _begin_call(self, event: CallBegin) -> Iterator[Json]:
        call_id = event.call_id or id_of_call(self._name, event.index)
        item = {"type": "function_call", "call_id": call_id, "name": event.name, "arguments": ""}
        if event.name in self._namespaces:
            item["namespace"], item["name"] = self._namespaces[event.name]
        yield from self._begin(item, "fc")

    def _begin(self, item: Json, prefix: str) -> Iterator[Json]:
        yield from self.close()
        self._pieces, self._logprobs = [], []
        self._open = {
            "id": f"{prefix}_{self._name}_{len(self.items)}",
            **item,
            "status": "in_progress",
        }
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.items),
            "item": self._open,
        }

    def _event(self, kind: str, *, has_part: bool = True, **fields: Any) -> Json:
        assert self._open is not None
        place: Json = {"item_id": self._open["id"], "output_index": len(self.items)}
        if has_part:
            place["content_index"] = 0
        return {"type": kind, **place, **fields}


def _text_type(item: Json) -> str:
    return "output_text" if item["type"] == "message" else "reasoning_text"


def _part(kind: str, text: str, logprobs: list[Json]) -> Json:
    part: Json = {"type": kind, "text": text}
    return part | {"annotations": [], "logprobs": logprobs} if kind == "output_text" else part
