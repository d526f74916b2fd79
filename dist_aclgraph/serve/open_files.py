"""How many descriptors a process may have open."""

from __future__ import annotations

import resource
import sys

OTHER_FILES = 512  # descriptors for all that is no client's


def allow_open_files(wanted: int) -> int:
    """Raise this process's own limit of open files, as far as it may; return what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
