"""Raises the limit of file descriptors that a process may have open."""

from __future__ import annotations

import resource
import sys

OTHER_FILES = 512  # descriptors that do not belong to clients


def _allow_open_files(wanted: int) -> int:
    """Raise this process's limit of open files as far as allowed; return the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def allow_connections(max_connections: int) -> int:
    """Raise the limit for this many clients; return how many connections can outlive this process.

    A connection that can outlive its process (``resume/``) needs a second descriptor, for its
    journal.
    """
    others = max_connections + OTHER_FILES
    return min(max_connections, max(0, _allow_open_files(max_connections + others) - others))
