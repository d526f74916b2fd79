"""Marks variations of tests as slow or rare, so that fewer make targets run these tests.

A slow variation runs in ``make test-more``, and a rare variation only in ``make test-all``. Another
variation, which an earlier target runs, tests the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return one set of a test's parameters, marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def rare(*values: Any) -> Any:
    """Return one set of a test's parameters, marked rare."""
    return pytest.param(*values, marks=(pytest.mark.slow, pytest.mark.rare))


def rare_unless(is_kept: Callable[[Any], bool], params: Iterable[Any]) -> list[Any]:
    """Return the values of one parameter; values for which ``is_kept`` is false are marked rare."""
    return [value if is_kept(value) else rare(value) for value in params]


def spread(params: Iterable[Any], quick: Sequence[Any], covering: Sequence[Any]) -> list[Any]:
    """Return the values of one parameter.

    Args:
        quick: values that ``make test`` tries.
        covering: values that ``make test-more`` tries. All other values are marked rare.
    """
    return [v if v in quick else slow(v) if v in covering else rare(v) for v in params]
