"""The events of a model's answer, in the order in which the model writes them.

Each API translates these events into its own objects (``serve``).
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text that the model writes for itself before it answers."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """The model begins to call a tool.

    Attributes:
        index: position of the call in the answer, from 0.
        call_id: the id that the model has written for the call; empty if the format has no ids.
    """

    index: int
    name: str
    call_id: str = ""


class CallArguments(msgspec.Struct, frozen=True):
    """A piece of a call's arguments. If the model wrote valid arguments, the joined pieces are a
    JSON object.
    """

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """The call is complete. If the answer ends within a call, no ``CallEnd`` follows."""

    index: int


Event: TypeAlias = Content | Reasoning | CallBegin | CallArguments | CallEnd
