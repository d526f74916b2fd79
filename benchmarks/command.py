"""How a bench is run from a command line."""

from __future__ import annotations

from collections.abc import Callable

import typer

from dist_aclgraph.errors import DistAclGraphError


def numbers(text: str) -> tuple[int, ...]:
    """Return the integers of an option, which stand between commas."""
    return tuple(map(int, text.split(",")))


def run_command(main: Callable[..., None]) -> None:
    """Run ``main`` with its options; an error of ours is one sentence and exit code 1."""
    try:
        typer.run(main)
    except DistAclGraphError as e:
        raise SystemExit(f"error: {e}") from None
