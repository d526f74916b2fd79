"""Keeping a local Ray out of the way of signals that are meant for its driver."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_process_group() -> Iterator[None]:
    """Start children in a process group of their own, then go back to ours.

    ``timeout``, a shell or a supervisor signals whole groups: Ray's daemons would die before the
    driver has stopped in order. Where this process leads its group, children stay in it.
    """
    ours = os.getpgrp()
    if ours == os.getpid():
        yield
        return
    os.setpgid(0, 0)
    try:
        yield
    finally:
        os.setpgid(0, ours)
