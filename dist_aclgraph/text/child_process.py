"""ChildProcess: another Python process, which replies to messages.

The kernel limits the time and the memory of the other process. Templates and grammars of clients
can need any amount of time and memory. So child processes render the templates
(``template_process``) and compile the grammars (``grammar_process``). The messages have the format
of ``template_process.receive``.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from dist_aclgraph.text.template_process import packed, receive


class ChildProcess:
    """One process; it serves one message at a time.

    Args:
        module: the module whose file the process runs as a program.
        imports: modules outside the standard library that the program imports.
        first: the first message; it is sent together with the first request, and gets no reply.
        wait_s: time in seconds for which ``ask`` waits for a reply.
    """

    def __init__(
        self,
        module: ModuleType,
        imports: Iterable[ModuleType],
        first: Mapping[str, Any],
        wait_s: float,
    ) -> None:
        folders = sorted({str(_folder_of(each)) for each in imports})
        self._first = packed(first)
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(wait_s)
        self._incoming = self._socket.makefile("rb")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(module.__file__), *folders],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
            )

    def ask(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Return the reply to a request. After an error, the caller must close the process.

        Raises:
            TimeoutError: there was no reply within ``wait_s``.
            EOFError, OSError: the process has ended.
        """
        self._socket.sendall(self._first + packed(request))
        self._first = b""
        reply: dict[str, str] = receive(self._incoming)
        return reply

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        """Wait for the end of a process that has stopped replying; return its exit code."""
        return int(self._process.wait())

    def close(self) -> None:
        self._incoming.close()
        self._socket.close()
        self._process.kill()
        self._process.wait()


def _folder_of(module: ModuleType) -> Path:
    """Return the folder that must be in ``sys.path`` to import the module."""
    depth = module.__name__.count(".") + hasattr(module, "__path__")
    return Path(str(module.__file__)).parents[depth]


def close_all(processes: Iterable[ChildProcess]) -> None:
    for process in processes:
        process.close()
