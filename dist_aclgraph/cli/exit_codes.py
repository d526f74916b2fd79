"""What the end of a command is called: a sentence on stderr, and an exit code."""

from __future__ import annotations

import sys

from dist_aclgraph.errors import (
    ConfigError,
    DistAclGraphError,
    ModelError,
    PlacementError,
    RequestError,
)

FAILURE, MISTAKE = 1, 2  # ours or the machine's; the user's


def tell(error: DistAclGraphError) -> int:
    """Print an error, and return the exit code that it means."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    is_mistake = isinstance(error, ConfigError | ModelError | RequestError | PlacementError)
    return MISTAKE if is_mistake else FAILURE
