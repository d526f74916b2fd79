"""Starts processes with the fork server."""

from __future__ import annotations

import logging
import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._private import ray_constants

from dist_aclgraph.actors.forks.fork_server import ForkAddress, ForkServer
from dist_aclgraph.actors.host import processes
from dist_aclgraph.actors.host.process_starter import ProcessStarter
from dist_aclgraph.config import Config
from dist_aclgraph.device import emulator
from dist_aclgraph.device.kind import is_emulated_here

WORKER_SETUP = Path(__file__).with_name("worker_setup.py")

logger = logging.getLogger(__name__)


class ForkingStarter(ProcessStarter):
    """Owns a fork server from the first command until ``close``. Any thread may call all methods.

    If this object is sent to another process, the fork server of the last call of ``command`` is
    lent to the copy of this object.

    Args:
        lent: a fork server that another process owns, and that ends later than this process. While
            the lent server serves, this object uses the lent server. Otherwise, this object starts
            another server.
    """

    def __init__(self, lent: ForkAddress | None = None) -> None:
        self._lent = lent
        self._named: ForkAddress | None = None
        self._server: ForkServer | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[ForkingStarter], tuple[ForkAddress | None]]:
        return type(self), (self._named,)

    def command(self, config: Config) -> str | None:
        self._named = self._find_server(config)
        if self._named is not None:
            return self._named.command
        # The actor must not be forked, so its command is Python itself. By default, Ray uses the
        # command of the process that starts the actor. That command may be ``fork_client.py``.
        return shlex.quote(sys.executable)

    def _find_server(self, config: Config) -> ForkAddress | None:
        """Return the fork server for this configuration; None if there is no such server."""
        if not is_emulated_here(config.device.kind):
            # Processes for real devices are not forked. The command ``roll`` can replace emulated
            # devices by real devices.
            return None
        with self._lock:
            if self._lent is not None and self._lent.serves(config):
                return self._lent
            if self._server is not None and not self._server.address.serves(config):
                self._drop()
            if self._server is None and not self._is_closed and emulator.is_built():
                try:
                    self._server = ForkServer(config)
                except OSError as e:
                    logger.warning("there is no fork server, and each process loads alone: %s", e)
            return None if self._server is None else self._server.address

    @contextmanager
    def ray_settings(self) -> Iterator[dict[str, Any]]:
        """Let Ray start workers with our setup program (``worker_setup.py``) instead of Ray's
        program.
        """
        name = ray_constants.SETUP_WORKER_FILENAME
        # Ray joins a folder and this path. The folder has no effect, because the path is absolute.
        ray_constants.SETUP_WORKER_FILENAME = str(WORKER_SETUP)
        try:
            # Workers that Ray starts in advance are not forked, and Ray never uses these workers.
            yield {"prestart_worker_first_driver": False}
        finally:
            ray_constants.SETUP_WORKER_FILENAME = name

    def open_handles(self, pid: int) -> list[int]:
        return processes.open_handles({pid})

    def renew(self) -> None:
        with self._lock:
            self._lent = None
            self._drop()

    def end_started(self) -> None:
        with self._lock:
            lent, server = self._lent, self._server
        for address in (lent, None if server is None else server.address):
            if address is not None:
                address.end_forked()

    def disown(self) -> None:
        if self._server is not None:
            self._server.disown()
            self._lent, self._server = self._server.address, None

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._drop()

    def _drop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
