"""Tools of a request: their names and the JSON schemas of their parameters."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any, TypeAlias

TOOL_PART = "the tool "  # beginning of a grammar part's name; the tool's name follows
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # JSON schemas, by the tool's name


def without_marks(text: str) -> str:
    """Return a text without combining marks, such as the vowel signs of Hindi and Thai.

    Patterns of names are applied to this text, because for ``re`` combining marks are no letters.
    """
    return "".join(sign for sign in text if not unicodedata.category(sign).startswith("M"))
