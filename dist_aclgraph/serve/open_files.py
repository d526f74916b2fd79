"""How many descriptors a process may have open."""

from __future__ import annotations

import resource

OTHER_FILES = 512  # descriptors for all that is no client's


def allow_open_files(wanted: int) -> None:
    """Raise this process's own limit of open files, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
