"""Marks tests for ``make test-more``: variations of cases that ``make test`` tries only once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return the parameters of a test; all are marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_unless(is_kept: Callable[[Any], bool], params: Iterable[Any]) -> list[Any]:
    """Return the values of one parameter, with a mark for values that ``make test`` leaves out."""
    return [value if is_kept(value) else slow(value) for value in params]


def rare_unless(is_kept: Callable[[Any], bool], params: Iterable[Any]) -> list[Any]:
    """Return the values of one parameter, with marks for values that only ``make test-all`` has."""
    marks = (pytest.mark.slow, pytest.mark.rare)
    return [value if is_kept(value) else pytest.param(value, marks=marks) for value in params]
