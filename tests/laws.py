"""How many examples a law on the device is tried with.

``pytest`` alone takes a quarter of what a test names, ``--hypothesis-profile=full`` all.
"""

from __future__ import annotations

from hypothesis import settings

FULL, QUICK = 100, 25  # percent, in the profiles' own count of examples


def is_full() -> bool:
    """Whether the profile asks for all."""
    return settings().max_examples >= FULL


def count(full: int) -> int:
    """Return this profile's share of a number that a law names."""
    return -(-full * settings().max_examples // FULL)


def examples(full: int) -> settings:
    """Return settings for a law that names ``full`` examples."""
    return settings(max_examples=count(full))
