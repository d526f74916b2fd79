"""Marks variations of tests as slow: only ``make test-more`` runs them, not ``make test``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return one set of a test's parameters, marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_unless(is_kept: Callable[[Any], bool], params: Iterable[Any]) -> list[Any]:
    """Return the values of one parameter; values for which ``is_kept`` is false are marked slow."""
    return [value if is_kept(value) else slow(value) for value in params]


def rare_unless(is_kept: Callable[[Any], bool], params: Iterable[Any]) -> list[Any]:
    """Return the values of one parameter; only ``make test-all`` tries those that are not kept."""
    marks = (pytest.mark.slow, pytest.mark.rare)
    return [value if is_kept(value) else pytest.param(value, marks=marks) for value in params]
