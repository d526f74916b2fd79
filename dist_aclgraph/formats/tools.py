"""Tools of a request: their names and the JSON schemas of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

TOOL_PART = "the tool "  # beginning of the name of a grammar's part for one tool
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # schemas by name
