"""The version of this package and of its sources."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

VERSION = "0.1.0"


def hash_sources() -> str:
    """Return a hash of the current source files, because clones with equal versions can differ."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@cache
def build() -> str:
    """Return the version, and the hash that the sources had at the first call."""
    return build_of(hash_sources())


def build_of(sources: str) -> str:
    """Return the name of a build: version, and hash of the sources."""
    return f"{VERSION} with sources {sources}"
