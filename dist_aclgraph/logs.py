"""The log of this process: the format of the lines, and the files that contain the lines.

Modules write with ``logging.getLogger(__name__)``. An event is a line that programs can read: it
has a stable name, and values with names. ``docs/operate/logs.md`` lists the events.

``ProcessLog.open`` attaches handlers to the package's own logger. In a process with a terminal,
``open`` also attaches handlers to Ray's logger. Other loggers, and a user's program that uses
``LLM``, are not changed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal

from dist_aclgraph.config import LoggingConfig
from dist_aclgraph.files.log_folder import file_name, open_folder

PACKAGE, ACCESS, RAY = "dist_aclgraph", "dist_aclgraph.access", "ray"
Role = Literal["supervisor", "owner", "ingress", "service", "controller", "engine", "worker"]
SERVES_HTTP: tuple[Role, ...] = ("ingress", "service")
SELDOM_S = 10.0  # shortest time between two lines of a ``SeldomEvent``
EVENT, FIELDS = "event", "fields"  # attributes of a log record
# matches a value that is written without quotes
_BARE = re.compile(r"[A-Za-z0-9_.:/+@%,*()\[\]-]+")

logger = logging.getLogger(__name__)


def event(source: logging.Logger, name: str, level: int = logging.INFO, **fields: Any) -> None:
    """Write an event.

    Args:
        fields: the values by name; values that are None are omitted. Seconds are floats.
    """
    if source.isEnabledFor(level):
        found = {key: value for key, value in fields.items() if value is not None}
        line = _pairs({EVENT: name, **found})
        source.log(level, "%s", line, extra={EVENT: name, FIELDS: found}, stacklevel=2)


class SeldomEvent:
    """An event that a client could cause with each request. It is written at most once in
    ``SELDOM_S``, so clients cannot fill the log. Its field ``count`` is the number of events since
    the last line.
    """

    def __init__(
        self,
        source: logging.Logger,
        name: str,
        level: int = logging.INFO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._name, self._level = source, name, level
        self._clock = clock
        self._count = 0
        self._next_s = -math.inf  # earliest time of the next line

    def note(self, **fields: Any) -> None:
        """Count the event. Write a line if ``SELDOM_S`` has passed since the last line."""
        self._count += 1
        now_s = self._clock()
        if now_s >= self._next_s:
            event(self._source, self._name, self._level, **fields, count=self._count)
            self._count, self._next_s = 0, now_s + SELDOM_S


@contextmanager
def logged(source: logging.Logger, name: str, **fields: Any) -> Iterator[None]:
    """Write the event ``NAME_begun``, and at the end ``NAME_done`` or ``NAME_failed`` with the
    duration.
    """
    begin_s = time.monotonic()
    event(source, f"{name}_begun", **fields)
    try:
        yield
    except BaseException as e:
        took_s, cause = time.monotonic() - begin_s, f"{type(e).__name__}: {e}"
        event(source, f"{name}_failed", logging.ERROR, **fields, seconds=took_s, cause=cause)
        raise
    event(source, f"{name}_done", **fields, seconds=time.monotonic() - begin_s)


class ProcessLog:
    """The log of this process.

    Attributes:
        role: the purpose of the process.
        group, rank, get_epoch: the group and rank of the process, and a function that returns the
            group's epoch. Group, rank and epoch are None while they are unknown. Each line contains
            the values at the time when it is written.
        folder: the folder of the files; None while there are no files.
    """

    def __init__(self, role: Role, get_epoch: Callable[[], int | None] = lambda: None) -> None:
        self.role: Role = role
        self.group: int | None = None
        self.rank: int | None = None
        self.get_epoch = get_epoch
        self.folder: Path | None = None
        self._host = socket.gethostname()

    def open(self, config: LoggingConfig, *, has_terminal: bool = False) -> None:
        """Begin to write this process's lines. The new log replaces the log that the parent process
        has opened.

        If the files cannot be written, the lines are written to stderr.

        Args:
            has_terminal: whether a user reads this process's stderr. If so, warnings that are not
                events are also written to stderr.
        """
        main: logging.Handler = _StderrHandler()
        access, problem = main, ""
        if config.destination == "files":
            try:
                main, access = self._open_files(config)
            except OSError as e:
                problem = f"{e.filename}: {e.strerror}"
        for handler in (main, access):
            handler.setFormatter(_FORMATTERS[config.format](self))
        shown = [_TerminalHandler()] if has_terminal and self.folder is not None else []
        _attach(PACKAGE, config.level, main, *shown)
        if shown:  # Ray's messages are of no use to a user, so only Ray's errors are logged
            _attach(RAY, "error", main, propagates=False)
        _attach(ACCESS, "info" if config.access else "error", access, propagates=False)
        if problem:
            logger.warning("logs are written to stderr; the files cannot be written: %s", problem)

    def _open_files(self, config: LoggingConfig) -> tuple[logging.Handler, logging.Handler]:
        """Return the handlers of ordinary lines and of access lines.

        Raises:
            OSError: a file cannot be created.
        """
        folder, _ = open_folder(config)  # the folder stays locked until the process ends
        suffix = f"{file_name(self._host)}-{os.getpid()}.log"
        main = access = _FileHandler(folder / f"{self.role}-{suffix}", config)
        if config.access and self.role in SERVES_HTTP:
            access = _FileHandler(folder / f"access-{suffix}", config)
        self.folder = folder
        return main, access

    def fields(self) -> dict[str, Any]:
        """Return the values that are part of every line."""
        found = {
            "host": self._host,
            "role": self.role,
            "group": self.group,
            "rank": self.rank,
            "epoch": self.get_epoch(),
        }
        return {key: value for key, value in found.items() if value is not None}


def _attach(name: str, level: str, *handlers: logging.Handler, propagates: bool = True) -> None:
    target = logging.getLogger(name)
    for old in list(target.handlers):
        if isinstance(old, _FileHandler):
            old.close()
        if isinstance(old, _FileHandler | _StderrHandler) or name == RAY:
            target.removeHandler(old)
    for handler in handlers:
        target.addHandler(handler)
    target.setLevel(level.upper())
    target.propagate = propagates


class _FileHandler(RotatingFileHandler):
    """Writes lines to a file of limited size. If the disk is full, the lines are lost, and the
    process continues.
    """

    def __init__(self, path: Path, config: LoggingConfig) -> None:
        super().__init__(
            path,
            maxBytes=config.max_file_mib << 20,
            backupCount=config.max_old_files,
            encoding="utf-8",
        )
        self._has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._has_failed:
            self._has_failed = True
            print(f"warning: {self.baseFilename} lacks lines: {sys.exception()}", file=sys.stderr)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes lines to ``sys.stderr``. Reads this variable before each write, because a program may
    replace the object.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _TerminalHandler(_StderrHandler):
    """Writes warnings for a user as ``LEVEL: MESSAGE``. Events are not written, because they are
    not sentences.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self.addFilter(lambda record: not hasattr(record, EVENT))

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {record.getMessage()}"


class _TextFormatter(logging.Formatter):
    """Formats an entry as one line, ``TIME LEVEL host=... role=... MESSAGE``. A traceback becomes a
    quoted value.
    """

    def __init__(self, log: ProcessLog) -> None:
        super().__init__()
        self._log = log

    def format(self, record: logging.LogRecord) -> str:
        own = getattr(record, FIELDS, {})
        every = {key: value for key, value in self._log.fields().items() if key not in own}
        words = record.getMessage() if own else _one_line(record.getMessage())
        line = f"{_time_of(record)} {record.levelname} {_pairs(every)} {words}"
        if record.exc_info:
            line += f" {_pairs({'exception': self.formatException(record.exc_info)})}"
        return line


class _JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, log: ProcessLog) -> None:
        super().__init__()
        self._log = log

    def format(self, record: logging.LogRecord) -> str:
        found = {"time": _time_of(record), "level": record.levelname, **self._log.fields()}
        if (name := getattr(record, EVENT, None)) is not None:
            found |= {EVENT: name, **getattr(record, FIELDS)}
        else:
            found["message"] = record.getMessage()
        found["logger"] = record.name
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False, default=str)


_FORMATTERS = {"text": _TextFormatter, "json": _JsonFormatter}


def _time_of(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z"


def _pairs(fields: dict[str, Any]) -> str:
    return " ".join(f"{key}={_text_of(value)}" for key, value in fields.items())


def _text_of(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    if _BARE.fullmatch(text):
        return text
    # Quotes and escapes prevent a client's text from looking like another value or another line.
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())
