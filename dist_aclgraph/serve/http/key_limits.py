"""Limits the requests of each API key: requests a minute, and requests in progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from dist_aclgraph.serve.http.api_keys import ApiKey
from dist_aclgraph.serve.openai.errors import RETRY_AFTER_S, RateLimitError

MINUTE_S = 60.0


@dataclass
class _Usage:
    """The requests of one key.

    Attributes:
        running: number of requests in progress.
        tokens: number of requests that may begin now, computed as a token bucket. The maximum of
            ``tokens`` is the number of requests that may begin in one minute.
        counted_s: the time at which ``tokens`` was computed.
    """

    running: int
    tokens: float
    counted_s: float


class KeyLimits:
    """Counts the requests of the keys that have limits. Only one event loop may use this object.

    Each count belongs to a key's digest, so that the count stays when the keys file is read again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[bytes, _Usage] = {}

    def begin(self, key: ApiKey, *, is_owed: bool = False) -> None:
        """Count a request that begins. If no error is raised, the caller must later call ``end``.

        Args:
            is_owed: whether a previous process has accepted the request. If true, the request is
                counted as running, but never refused.

        Raises:
            RateLimitError: the key has reached a limit.
        """
        if not key.has_limits:
            return
        now_s = self._clock()
        rate = key.requests_per_minute
        usage = self._usage.setdefault(key.digest, _Usage(0, math.inf, now_s))
        if rate is not None:
            refilled = usage.tokens + (now_s - usage.counted_s) * rate / MINUTE_S
            usage.tokens, usage.counted_s = min(refilled, float(rate)), now_s
        if not is_owed:
            _check(key, usage)
            usage.tokens -= 1
        usage.running += 1

    def end(self, key: ApiKey) -> None:
        """Count the end of a request that began with this key."""
        if key.has_limits:
            self._usage[key.digest].running -= 1


def _check(key: ApiKey, usage: _Usage) -> None:
    if key.max_running is not None and usage.running >= key.max_running:
        raise RateLimitError(
            f"{usage.running} requests of the API key {key.name!r} are in progress, and it may "
            f"have {key.max_running}; wait until one has ended",
            retry_after_s=RETRY_AFTER_S,
        )
    if key.requests_per_minute is not None and usage.tokens < 1:
        wait_s = math.ceil((1 - usage.tokens) * MINUTE_S / key.requests_per_minute)
        raise RateLimitError(
            f"the API key {key.name!r} may begin {key.requests_per_minute} requests a minute; "
            f"try again in {wait_s} s",
            retry_after_s=wait_s,
        )
