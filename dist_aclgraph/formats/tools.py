"""Tools of a request: their names and the JSON schemas of their parameters."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any, TypeAlias

TOOL_PART = "the tool "  # begins the name of a tool's part of a grammar; the tool's name follows
# maps a tool's name to the JSON schema of its parameters
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]


def without_marks(text: str) -> str:
    """Return a text without combining marks, such as the vowel signs of Hindi and Thai.

    Patterns of names are applied to this text, because ``re`` does not count combining marks as
    letters.
    """
    return "".join(sign for sign in text if not unicodedata.category(sign).startswith("M"))
