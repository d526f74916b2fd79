"""How many descriptors a process may have open."""

from __future__ import annotations

import resource
import sys

OTHER_FILES = 512  # descriptors that are not of clients


def _allow_open_files(wanted: int) -> int:
    """Raise the limit of open files of this process as far as allowed; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def allow_connections(max_connections: int) -> int:
    """Raise the limit for so many clients; return how many of their connections can outlive their
    process (``resume/``): each of those takes one descriptor more, its journal's.
    """
    others = max_connections + OTHER_FILES
    return min(max_connections, max(0, _allow_open_files(max_connections + others) - others))
