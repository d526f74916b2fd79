"""How Ray starts the processes of a deployment on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dist_aclgraph.config import Config


class ProcessStarter:
    """Ray's own start: each process is a Python that loads for itself, and that Ray can end.

    Other ways to start processes are subclasses, which ``choose_starter`` names. A starter may be
    sent to another process; in a forked process, call ``disown`` first.
    """

    def command(self, config: Config) -> str | None:
        """Return what Ray runs in place of Python for a process; None for Python itself."""
        return None

    @contextmanager
    def ray_settings(self) -> Iterator[dict[str, Any]]:
        """Yield the settings of a Ray that is to be started; it is started within this context."""
        yield {}

    def open_handles(self, pid: int) -> list[int]:
        """Return a handle of a process, if Ray cannot kill it as it has not started it.

        ``processes.kill_handles`` takes the result.
        """
        return []

    def renew(self) -> None:
        """Replace the server of previous starts, if there is one: it may hang."""

    def end_started(self) -> None:
        """Kill all processes that Ray has not started itself."""

    def disown(self) -> None:
        """In a forked process: leave what this object owns to the parent."""

    def close(self) -> None:
        """Start no more processes, and free what this object owns."""
