"""Sets how many examples a law tries. A law is a hypothesis test. The laws that use this module run
on the device.

Each test gives a number of examples. By default, a law tries a tenth of this number. With
``--hypothesis-profile=full``, it tries the whole number.
"""

from __future__ import annotations

from hypothesis import settings

# Percentage of examples in each hypothesis profile, stored as the profile's ``max_examples``.
FULL, QUICK = 100, 10


def is_full() -> bool:
    """Return whether laws try all of their examples in the current profile."""
    return settings().max_examples >= FULL


def count(full: int) -> int:
    """Return the number of examples in the current profile, for a law that tries ``full`` examples
    in the profile "full".
    """
    return -(-full * settings().max_examples // FULL)


def examples(full: int) -> settings:
    """Return settings for a law that tries ``full`` examples in the profile "full"."""
    return settings(max_examples=count(full))
