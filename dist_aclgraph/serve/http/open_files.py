"""Raises the limit of file descriptors that a process may have open."""

from __future__ import annotations

import resource
import sys
from typing import NamedTuple

OTHER_FILES = 512  # number of descriptors that are not for clients


class ConnectionLimits(NamedTuple):
    """The numbers of connections that the limit of open files allows.

    Attributes:
        max_open: number of connections that may be open at the same time.
        max_kept: number of connections that may outlive this process (``resume/``). Each of them
            needs a second descriptor, for its journal.
    """

    max_open: int
    max_kept: int


def allow_connections(max_connections: int) -> ConnectionLimits:
    """Raise the limit of open files for ``max_connections`` clients; return how many connections
    the resulting limit allows.

    An answer without a journal is lost when this process ends. If the limit is too low for two
    descriptors per client, a third of the descriptors is reserved for journals.
    """
    limit = _allow_open_files(2 * max_connections + OTHER_FILES)
    room = max(limit - OTHER_FILES, limit // 2)
    max_kept = min(max_connections, max(room - max_connections, room // 3))
    return ConnectionLimits(min(max_connections, room - max_kept), max_kept)


def _allow_open_files(wanted: int) -> int:
    """Raise this process's limit of open files as far as allowed; return the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
