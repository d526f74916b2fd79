"""API keys, each with a name and limits; the keys file is read again after it has changed.

Only hashes of keys stay in memory, and no message contains a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_aclgraph.errors import ConfigError
from dist_aclgraph.files.key_files import read_key_file, unreadable

FILE_KEY = "serve.api_keys_file"
MIN_KEY_CHARS = 16
MAX_FILE_BYTES = 1 << 20
LOOK_S = 1.0  # seconds between two checks of the file
OPTIONS = "name=NAME, requests_per_minute=N, running=N"
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_LIMIT = re.compile(r"[1-9][0-9]{0,8}")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ApiKey:
    """One API key.

    Attributes:
        digest: SHA-256 of the key.
        name: identifies the key in logs. A key without a name gets the first digits of its digest.
        requests_per_minute: limit of POST requests; None means no limit.
        max_running: limit of POST requests in progress; None means no limit.
    """

    digest: bytes
    name: str
    requests_per_minute: int | None = None
    max_running: int | None = None

    @property
    def has_limits(self) -> bool:
        return self.requests_per_minute is not None or self.max_running is not None

    @classmethod
    def of(cls, key: str, name: str | None = None, **limits: int | None) -> ApiKey:
        digest = hashlib.sha256(key.encode()).digest()
        return cls(digest, name or f"key-{digest.hex()[:8]}", **limits)


class ApiKeys:
    """The valid keys: fixed keys, and the keys that a file contains now. Only one thread may use
    this object.

    If the changed file cannot be used, the previous keys stay valid, and one error is logged. A
    pickled copy in another process reads the file itself.

    Args:
        path: the file ``serve.api_keys_file``; None if there is no file.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(
        self,
        path: Path | None = None,
        fixed: tuple[ApiKey, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._fixed = fixed
        self._clock = clock
        self._keys = fixed
        self._seen: Any = None
        self._problem = ""
        # A copy of this object may be on a machine with a different monotonic clock. With minus
        # infinity, the copy checks the file at once.
        self._next_look_s = -math.inf
        if path is not None:
            self._read(path)

    def find(self, given: bytes) -> ApiKey | None:
        """Return the valid key that a client has sent; None if the key is not valid."""
        if self._path is not None and self._clock() >= self._next_look_s:
            self._next_look_s = self._clock() + LOOK_S
            self._look(self._path)
        digest = hashlib.sha256(given.strip()).digest()
        # Compare with every key, so that the response time gives no hint about keys.
        found = [key for key in self._keys if hmac.compare_digest(digest, key.digest)]
        return found[0] if found else None

    def _look(self, path: Path) -> None:
        """Read the file if it has changed. If the file cannot be used, log the reason once."""
        try:
            if self._read(path):
                log.info("serve.api_keys_file %s was read again: %d keys", path, len(self._keys))
            return
        except ConfigError as e:
            problem = str(e)
        if problem != self._problem:
            log.error("the API keys stay as they were: %s", problem)
        self._problem = problem

    def _read(self, path: Path) -> bool:
        """Read the file if it has changed since the last read; return whether it was read.

        Raises:
            ConfigError: the file cannot be used.
        """
        try:
            state = path.stat()
        except OSError as e:
            raise unreadable(FILE_KEY, path, e) from e
        seen = state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
        if seen == self._seen:
            return False
        self._keys = (*read_keys(path), *self._fixed)
        self._seen, self._problem = seen, ""
        return True


def read_keys(path: Path) -> list[ApiKey]:
    """Return the keys of a file, whose lines are ``KEY [name=NAME] [LIMIT=N] ...``.

    Raises:
        ConfigError: the file cannot be read; other users can read or change the file; a line is
            wrong; or the file contains no key.
    """
    lines = read_key_file(FILE_KEY, path, MAX_FILE_BYTES).splitlines()
    numbered = [(number, line.split()) for number, line in enumerate(lines, 1)]
    keys = [
        _parse(words, f"line {number} of serve.api_keys_file {path}")
        for number, words in numbered
        if words and not words[0].startswith("#")
    ]
    if not keys:
        raise ConfigError(f"serve.api_keys_file {path} has no keys; write one on each line")
    return keys


def check_length(key: str, where: str) -> None:
    """Check the length of a key; ``where`` says where the key was read.

    Raises:
        ConfigError: the key is too short.
    """
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(
            f"{where} has a key of {len(key)} characters; keys have at least {MIN_KEY_CHARS}, "
            "as of: openssl rand -hex 16"
        )


def _parse(words: list[str], where: str) -> ApiKey:
    """Return the key of one line. Error messages contain no words of the line, because any word may
    be a key.
    """
    key, *options = words
    check_length(key, where)
    given = dict(option.partition("=")[::2] for option in options)
    name = given.pop("name", None)
    rate, running = given.pop("requests_per_minute", None), given.pop("running", None)
    if given:
        raise ConfigError(f"{where} has words that are no options; after the key: {OPTIONS}")
    if name is not None and not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where} has a wrong name; names have up to 64 letters, digits and the characters ._@-"
        )
    if any(limit is not None and not _LIMIT.fullmatch(limit) for limit in (rate, running)):
        raise ConfigError(f"{where} has a wrong limit; limits are whole numbers from 1 on")
    return ApiKey.of(
        key,
        name,
        requests_per_minute=None if rate is None else int(rate),
        max_running=None if running is None else int(running),
    )
