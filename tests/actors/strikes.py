"""Faults that happen to a deployment while its requests run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.actors.leftovers import wait_until
from tests.deployments import Answer


def wait_for_tokens(answers: Sequence[Answer], count: int = 5) -> None:
    """Wait until every stream has more than ``count`` tokens."""
    wait_until(lambda: all(len(answer.tokens) > count for answer in answers), "none runs")


def arm(file: Path, words: str) -> None:
    """Plant the fault that ``words`` describe (see emulator/README.md); the next matching call
    fails.
    """
    draft = file.with_suffix(".draft")
    draft.write_text(words)
    draft.rename(file)


def strike(file: Path, words: str) -> None:
    """Plant a fault, and wait until it has made a device fail."""
    arm(file, words)
    wait_until(lambda: not file.exists(), "the fault has struck nobody")
