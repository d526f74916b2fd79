"""Turns errors of llguidance into sentences for clients."""

from __future__ import annotations

import re

MAX_ERROR_CHARS = 500
TOO_AMBIGUOUS = (
    "it is too ambiguous, because its rules can read the same text in too many ways; give each "
    "text one reading, and repeat a rule with * instead of naming the rule within itself"
)
# The library's error message contains these words if a grammar reaches the limit of states.
TOO_MANY_STATES = "too many states"
LINE = re.compile(r"(?:at )?(\d+)\(\d+\): ")  # matches the position of an error
_TOO_MANY = re.compile(r"Too many items|Current row has \d+ items")


def reason_of(message: str) -> str:
    """Return the line of the library's message that says why the library refused a grammar. For
    errors in patterns, this is the last line.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if not said and lines:
        lines = [LINE.sub("", lines[0]).removeprefix("failed to compile JSON schema: ")]
    reason = f"{(said or lines or ['it cannot be compiled'])[0]:.{MAX_ERROR_CHARS}}"
    return f"{TOO_AMBIGUOUS} ({reason})" if _TOO_MANY.search(reason) else reason
