"""Converts events of an answer to content, reasoning and tool calls of chat completion objects."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from dist_aclgraph.formats.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)


def delta_of(events: Sequence[Event], name: str) -> dict[str, Any]:
    """Return the ``delta`` of a chunk: the parts that the events add to a message.

    Only a call's first delta contains the call's id, type and name. Fields without a value are
    omitted, because clients concatenate the values of a field from all deltas.

    Args:
        name: the name of the answer, from which ids of calls are made.
    """
    if len(events) == 1:  # the usual case, handled faster
        (event,) = events
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, CallArguments):
            function = {"arguments": event.text}
            return {"tool_calls": [{"index": event.index, "function": function}]}
    content, reasoning = "", ""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, CallBegin):
            calls[event.index] = {
                "index": event.index,
                "id": event.call_id or id_of_call(name, event.index),
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
        elif isinstance(event, CallArguments):
            call = calls.setdefault(event.index, {"index": event.index, "function": {}})
            call["function"].setdefault("arguments", "")
            call["function"]["arguments"] += event.text
    delta: dict[str, Any] = {}
    if reasoning:
        delta |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if content:
        delta["content"] = content
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


class WholeCalls:
    """Holds back the events of each call until the call is complete, or the answer ends."""

    def __init__(self) -> None:
        self._held: dict[int, list[Event]] = {}  # position of a call in the answer -> its events

    def add(self, events: Sequence[Event], *, is_last: bool) -> list[Event]:
        """Add the next events of the answer; return the events that can be passed on."""
        found: list[Event] = []
        for event in events:
            if isinstance(event, (CallBegin, CallArguments)):
                self._held.setdefault(event.index, []).append(event)
            elif isinstance(event, CallEnd):
                found += self._held.pop(event.index, [])
            else:
                found.append(event)
        if is_last:
            for held in self._held.values():
                found += held
            self._held = {}
        return found


def message_of(events: Sequence[Event], name: str) -> dict[str, Any]:
    """Return the message of an answer that is not streamed."""
    delta = delta_of(events, name)
    calls = delta.pop("tool_calls", [])
    message = {"role": "assistant", "content": None if calls else "", "refusal": None, **delta}
    if calls:
        message["tool_calls"] = [
            {field: value for field, value in call.items() if field != "index"} for call in calls
        ]
    return message


def id_of_call(name: str, index: int) -> str:
    """Return the id of a call. Another process that continues the answer computes the same id."""
    return "call_" + hashlib.sha256(f"{name}-{index}".encode()).hexdigest()[:24]
