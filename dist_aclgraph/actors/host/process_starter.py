"""How Ray starts the processes of a deployment on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dist_aclgraph.config import Config


class ProcessStarter:
    """Ray's own start: each process is a Python that loads for itself, and that Ray can end.

    Another way of starting processes is a subclass, which ``choose_starter`` names. A starter may
    be sent to another process, and a process that was forked keeps it by ``disown``.
    """

    def command(self, config: Config) -> str | None:
        """Return what Ray runs in place of Python for a process; None for Python itself."""
        return None

    @contextmanager
    def ray_settings(self) -> Iterator[dict[str, Any]]:
        """Yield the settings of a Ray that is to be started; it is started within this context."""
        yield {}

    def open_handles(self, pid: int) -> list[int]:
        """Return handles by which to kill a process that Ray cannot end, as it has not started it.

        ``processes.kill_handles`` takes them.
        """
        return []

    def renew(self) -> None:
        """Start the next process by other means than the last ones, which may hang."""

    def end_started(self) -> None:
        """Kill all processes that Ray has not started itself."""

    def disown(self) -> None:
        """Leave what this object owns to the parent process, in one that was forked."""

    def close(self) -> None:
        """Start no more processes, and end what was needed for it."""
