"""ChatTemplate: a checkpoint's own template, rendered in a child process with limits.

Jinja's sandbox limits neither time nor memory: one filter can compute for hours, or fill the memory
of the service. The kernel limits both for a process (``template_process``). A process serves one
render at a time. The next render reuses an idle process, or starts another one.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from dist_aclgraph.errors import InvalidParameterError, ModelError
from dist_aclgraph.shapes.json_files import read_text
from dist_aclgraph.text import template_process

MAX_PROCESSES = 4


@dataclass(frozen=True)
class RenderLimits:
    """What one render may take.

    Attributes:
        cpu_s: time on a processor; published templates take milliseconds.
        wait_s: how long the parent waits for the answer before it kills the process.
        memory_bytes: address space of its process.
        chars: length of the prompt.
    """

    cpu_s: float = 4.0
    wait_s: float = 20.0
    memory_bytes: int = 512 << 20
    chars: int = 4 << 20


class ChatTemplate:
    """Renders messages. Safe to share between threads; owns the processes that render."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        limits: RenderLimits = RenderLimits(),
    ) -> None:
        """Check the syntax of a template. No process is started before the first render.

        Raises:
            jinja2.TemplateError: the syntax is wrong.
        """
        template_process.make_environment().parse(source)
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._limits = limits
        self._permits = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: list[_Process] = []
        weakref.finalize(self, _close_all, self._idle)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt that the template makes of the messages.

        Raises:
            InvalidParameterError: the template refuses the messages, cannot render them, or
                reaches a limit.
        """
        variables = {
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
        }
        with self._permits:
            process = self._take_process()
            try:
                reply = process.ask(variables)
            except BaseException:
                process.close()
                raise
            self._idle.append(process)
        if "error" in reply:
            raise InvalidParameterError(reply["error"], "messages")
        return reply["text"]

    def _take_process(self) -> _Process:
        try:
            process = self._idle.pop()  # atomic: no other thread takes the same
        except IndexError:
            return _Process(self._source, self._limits)
        if process.is_alive():
            return process
        process.close()  # the system's OOM killer may have ended it
        return self._take_process()


class _Process:
    """One process that renders; see ``template_process``."""

    def __init__(self, source: str, limits: RenderLimits) -> None:
        folders = {str(Path(str(m.__file__)).parents[1]) for m in (jinja2, markupsafe)}
        self._limits = limits
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(limits.wait_s)
        self._incoming = self._socket.makefile("rb")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", template_process.__file__, *folders],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
            )
        self._first = template_process.packed({"source": source, **asdict(limits)})

    def ask(self, variables: Mapping[str, Any]) -> dict[str, str]:
        """Return the answer to one render.

        Raises:
            InvalidParameterError: the process reached a limit, and has to be closed.
        """
        try:
            self._socket.sendall(self._first + template_process.packed(variables))
            self._first = b""
            reply: dict[str, str] = template_process.receive(self._incoming)
        except TimeoutError:
            why = f"takes more than {self._limits.wait_s:g} s"
        except (EOFError, OSError):
            why = self._why_ended()
        else:
            return reply
        raise InvalidParameterError(
            f"the chat template {why}; send shorter messages, or correct the template", "messages"
        )

    def _why_ended(self) -> str:
        """Return what the template did that ended the process."""
        limits = self._limits
        code: int = self._process.wait()
        if code == -signal.SIGPROF:
            return f"takes more than {limits.cpu_s:g} s of processor time"
        if code == template_process.OUT_OF_MEMORY:
            return f"takes more than {limits.memory_bytes >> 20} MiB of memory"
        return f"has ended the process that renders it (exit code {code})"

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._incoming.close()
        self._socket.close()
        self._process.kill()
        self._process.wait()


def read_chat_template(
    directory: Path, described: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """Return the chat template of a checkpoint, None where it has none.

    Args:
        described: the content of its tokenizer_config.json.
        special_tokens: its special tokens by name.

    Raises:
        ModelError: the template cannot be read, or does not compile.
    """
    path = directory / "chat_template.jinja"
    source = read_text(path) if path.exists() else described.get("chat_template")
    if isinstance(source, list):  # several named templates; "default" is the chat's
        named = [item for item in source if isinstance(item, dict)]
        source = next((t.get("template") for t in named if t.get("name") == "default"), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(f"the chat template in {directory} is {source!r:.80}; it must be a text")
    try:
        return ChatTemplate(source, special_tokens)
    except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as e:
        raise ModelError(f"the chat template in {directory} does not compile: {e}") from e


def _close_all(processes: list[_Process]) -> None:
    for process in processes:
        process.close()
