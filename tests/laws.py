"""How many examples a law on the device is tried with.

``pytest`` alone takes a quarter of what a test names, ``--hypothesis-profile=full`` all.
"""

from __future__ import annotations

from hypothesis import settings

FULL, QUICK = 100, 25  # percent, in the profiles' own count of examples


def examples(count: int) -> settings:
    """Return settings for a law that names ``count`` examples."""
    return settings(max_examples=-(-count * settings().max_examples // FULL))
