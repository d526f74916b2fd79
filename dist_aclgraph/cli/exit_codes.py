"""Prints the error that ends a command, and chooses the command's exit code."""

from __future__ import annotations

import sys

from dist_aclgraph.errors import (
    ConfigError,
    DistAclGraphError,
    ModelError,
    PlacementError,
    RequestError,
)

# FAILURE: the program or the machine has failed. MISTAKE: the user has made a mistake.
FAILURE, MISTAKE = 1, 2


def tell(error: DistAclGraphError) -> int:
    """Print an error, and return its exit code."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    is_mistake = isinstance(error, ConfigError | ModelError | RequestError | PlacementError)
    return MISTAKE if is_mistake else FAILURE
