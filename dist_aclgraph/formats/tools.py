"""Tools of a request: their names and the JSON schemas of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

TOOL_PART = "the tool "  # beginning of a grammar part's name; the tool's name follows
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # JSON schemas, by the tool's name
