"""Starts the processes of a deployment on this machine with Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dist_aclgraph.config import Config


class ProcessStarter:
    """Starts processes as Ray does: each process is a new Python process, and Ray can end it.

    Subclasses start processes in other ways; ``choose_starter`` chooses the class. A starter may be
    sent to another process. In a forked process, call ``disown`` before any other method.
    """

    def command(self, config: Config) -> str | None:
        """Return the command that Ray runs instead of Python to start a process; None if Ray runs
        Python.
        """
        return None

    @contextmanager
    def ray_settings(self) -> Iterator[dict[str, Any]]:
        """Yield options of ``ray.init`` for a Ray that is started within this context."""
        yield {}

    def open_handles(self, pid: int) -> list[int]:
        """Return handles with which ``processes.kill_handles`` can kill a process.

        The list is empty if Ray itself started the process, because Ray can kill such a process.
        """
        return []

    def renew(self) -> None:
        """Replace the fork server, which may hang, by a new one. Does nothing without a fork
        server.
        """

    def end_started(self) -> None:
        """Kill all processes that a fork server has started for this object."""

    def disown(self) -> None:
        """To be called in a forked process. The parent process stays the owner of this object's
        resources.
        """

    def close(self) -> None:
        """Start no more processes, and free everything that this object owns."""
