"""The number of examples for a law (a hypothesis test) that uses the device.

By default, a law tries a quarter of the examples that the test names. With
``--hypothesis-profile=full``, it tries all examples.
"""

from __future__ import annotations

from hypothesis import settings

FULL, QUICK = 100, 25  # percent; stored as the number of examples of the hypothesis profiles


def is_full() -> bool:
    """Whether the profile demands all examples."""
    return settings().max_examples >= FULL


def count(full: int) -> int:
    """Return the number of examples for this profile, from the number that a law names."""
    return -(-full * settings().max_examples // FULL)


def examples(full: int) -> settings:
    """Return settings for a law that names ``full`` examples."""
    return settings(max_examples=count(full))
