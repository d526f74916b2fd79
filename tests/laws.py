"""The number of examples for a law (a hypothesis test) that uses the device.

By default, a law tries a tenth of the examples that the test names. With
``--hypothesis-profile=full``, a law tries all examples.
"""

from __future__ import annotations

from hypothesis import settings

# Percentage of examples in each hypothesis profile; the profile stores it as its ``max_examples``.
FULL, QUICK = 100, 10


def is_full() -> bool:
    """Return whether the current profile runs all examples."""
    return settings().max_examples >= FULL


def count(full: int) -> int:
    """Return the number of examples in this profile for a law with ``full`` examples."""
    return -(-full * settings().max_examples // FULL)


def examples(full: int) -> settings:
    """Return settings for a law that has ``full`` examples in the full profile."""
    return settings(max_examples=count(full))
