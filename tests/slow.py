"""Marks parameters of tests as slow or rare, so that fewer make targets run these variations of the
tests.

``make test-more`` also runs slow variations; only ``make test-all`` runs rare variations. For each
slow or rare variation, a faster target runs another variation that tests the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return one set of parameters for a test, marked as slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def rare(*values: Any) -> Any:
    """Return one set of parameters for a test, marked as rare."""
    return pytest.param(*values, marks=(pytest.mark.slow, pytest.mark.rare))


def rare_unless(is_kept: Callable[[Any], bool], params: Iterable[Any]) -> list[Any]:
    """Return a parameter's values. Values for which ``is_kept`` is false are marked as rare."""
    return [value if is_kept(value) else rare(value) for value in params]


def spread(params: Iterable[Any], quick: Sequence[Any], covering: Sequence[Any]) -> list[Any]:
    """Return the values of one parameter.

    Args:
        quick: values that ``make test`` tries; not marked.
        covering: values that ``make test-more`` also tries; marked as slow. All other values are
            marked as rare.
    """
    return [v if v in quick else slow(v) if v in covering else rare(v) for v in params]
