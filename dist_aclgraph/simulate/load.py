"""The load of a simulation. A load consists of batches or of requests. Batches and requests can be
read line by line from a trace; requests can also be drawn at random.

A trace is a file of JSON lines, or of CSV with a header. Each line is one of these:

- a batch, which is one step of a rank. A batch has the column ``decode``, or the columns
  ``num_reqs`` and ``query_len``, or the column ``tokens``. ``decode`` is the number of requests
  that decode. ``tokens`` is the number of tokens in a mixture of prefill and decode. If prompts are
  split among ranks, ``tokens`` counts only the tokens of one rank.
- a request, with the columns ``arrival_s``, ``prompt_tokens`` and ``output_tokens``. Lines are in
  the order of arrival. If prompts share a prefix, a line also has ``shared_tokens``, the length of
  the prefix. If there are several prefixes, ``shared`` is the number of the prefix.

Other columns are ignored. Only one line is in memory at a time.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from dist_aclgraph.errors import ConfigError

MAX_LINE_BYTES = 1 << 16
MAX_TOKENS = 1 << 20  # maximum number of tokens of a batch or a prompt
SPREAD = 0.7  # standard deviation of the logarithms of lengths that are drawn at random
CHUNK = 1024  # number of requests that are drawn at once
SHOWN = 80  # maximum number of characters of an invalid line in an error message

REQUEST_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
BATCH_COLUMNS = (("decode",), ("num_reqs", "query_len"), ("tokens",))
EXPECTED = {
    "requests": "arrival_s, prompt_tokens and output_tokens",
    "batches": "decode, or num_reqs and query_len, or tokens",
}
Kind = Literal["batches", "requests"]


class Batch(NamedTuple):
    """One step of a rank. Padding is not counted in ``num_tokens``.

    ``query_len`` is the number of tokens of each request; 0 if this number differs between
    requests.
    """

    num_tokens: int
    num_reqs: int
    query_len: int


class Arrival(NamedTuple):
    """One request. Its prompt begins with the first ``shared_tokens`` tokens of prefix number
    ``shared``.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    shared: int = 0
    shared_tokens: int = 0

    def token_ids(self, number: int) -> list[int]:
        """Return the token ids of the request's prompt.

        Prompts with the same ``shared`` begin with the same prefix. After the prefix, the tokens of
        all prompts differ.

        Args:
            number: a number that no other request has; the tokens after the prefix depend on it.
        """
        own = self.prompt_tokens - self.shared_tokens
        return [-1 - self.shared] * self.shared_tokens + [number % (1 << 31)] * own


@dataclass(frozen=True)
class Beginnings:
    """Prefixes that prompts share. The probability of the n-th prefix is proportional to 1 / n.

    Attributes:
        count: number of different prefixes.
        tokens: number of tokens of each prefix. The prefix is added to the prompt's own tokens.
    """

    count: int
    tokens: int

    def given_to(self, arrivals: Iterable[Arrival], seed: tuple[int, ...]) -> Iterator[Arrival]:
        """Yield the arrivals, with a prefix added before each prompt."""
        random = np.random.default_rng((*seed, self.count))
        rarity = 1 / np.arange(1, self.count + 1)
        each = np.cumsum(rarity / rarity.sum())
        for arrival in arrivals:
            shared = int(np.searchsorted(each[:-1], random.random()))
            yield arrival._replace(
                prompt_tokens=arrival.prompt_tokens + self.tokens,
                shared=shared,
                shared_tokens=self.tokens,
            )


Item = TypeVar("Item", Batch, Arrival)


@dataclass
class Load(Generic[Item]):
    """A load that can be iterated several times.

    Attributes:
        begin: a function that returns a new iterator over the load.
        progress: a function that returns the fraction of the load that has been read, from 0 to 1.
    """

    begin: Callable[[], Iterator[Item]]
    progress: Callable[[], float]


class Trace:
    """A trace file. The first line decides whether the file contains batches or requests.

    Raises:
        ConfigError: the file cannot be read, or its first line is neither a batch nor a request.
    """

    def __init__(self, path: Path, decode_len: int = 1) -> None:
        """Read the first line, to find out what the trace contains.

        Args:
            decode_len: number of tokens that a decoding request has in a batch.
        """
        self._path = path
        self._decode_len = decode_len
        self._read = 0
        try:
            self._size = path.stat().st_size
            first = next(self._lines(), None)
        except OSError as e:
            raise ConfigError(f"cannot read the trace {path}: {e.strerror}") from e
        if first is None:
            raise ConfigError(f"the trace {path} is empty; expected {_either()}")
        self._columns: list[str] | None = None
        number, text = first
        if text.startswith("{"):
            named = set(self._object(number, text))
        else:
            self._columns = [name.strip() for name in next(csv.reader([text]))]
            named = set(self._columns)
        if named & set(REQUEST_COLUMNS):
            self.kind: Kind = "requests"
        elif any(named.issuperset(columns) for columns in BATCH_COLUMNS):
            self.kind = "batches"
        else:
            raise self._bad(number, text, _either())

    def batches(self) -> Load[Batch]:
        return Load(self._batches, self._progress)

    def requests(self) -> Load[Arrival]:
        return Load(self._requests, self._progress)

    def _progress(self) -> float:
        return self._read / self._size if self._size else 1.0

    def _batches(self) -> Iterator[Batch]:
        for number, text, fields in self._records():
            yield self._batch(number, text, fields)

    def _requests(self) -> Iterator[Arrival]:
        last_s = 0.0
        for number, text, fields in self._records():
            arrival_s = self._number(number, text, fields, "arrival_s")
            if arrival_s < last_s:
                expected = f"arrival_s of {last_s:g} or later, as requests come in order"
                raise self._bad(number, text, expected)
            last_s = arrival_s
            prompt = self._count(number, text, fields, "prompt_tokens")
            output = self._count(number, text, fields, "output_tokens")
            shared = self._count_or_none(number, text, fields, "shared")
            shared_tokens = self._count_or_none(number, text, fields, "shared_tokens")
            if shared_tokens > prompt:
                raise self._bad(number, text, f"shared_tokens up to the prompt's {prompt}")
            yield Arrival(arrival_s, prompt, output, shared, shared_tokens)

    def _batch(self, number: int, text: str, fields: Mapping[str, Any]) -> Batch:
        given = [c for c in BATCH_COLUMNS if any(fields.get(name) not in (None, "") for name in c)]
        if len(given) != 1:
            raise self._bad(number, text, f"one of {EXPECTED['batches']}")
        counts = [self._count(number, text, fields, name) for name in given[0]]
        if given[0] == ("tokens",):
            return Batch(counts[0], 1, 0)
        num_reqs, query_len = counts if len(counts) == 2 else (counts[0], self._decode_len)
        if num_reqs * query_len > MAX_TOKENS:
            raise self._bad(number, text, f"at most {MAX_TOKENS} tokens in a batch")
        return Batch(num_reqs * query_len, num_reqs, query_len)

    def _records(self) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        lines = self._lines()
        if self._columns is None:
            for number, text in lines:
                yield number, text, self._object(number, text)
            return
        next(lines)
        for number, text in lines:
            try:
                values = next(csv.reader([text], strict=True))
            except csv.Error:
                raise self._bad(number, text, "comma-separated values") from None
            if len(values) != len(self._columns):
                expected = f"{len(self._columns)} values: {', '.join(self._columns)}"
                raise self._bad(number, text, expected)
            yield number, text, dict(zip(self._columns, values, strict=True))

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Yield the number and the text of each line that is not blank."""
        self._read = 0
        with self._path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE_BYTES):
                number += 1
                self._read += len(raw)
                text = raw.decode("utf-8", errors="replace").strip().lstrip("\ufeff")
                if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                    raise self._bad(number, text, f"lines of less than {MAX_LINE_BYTES} bytes")
                if text:
                    yield number, text

    def _object(self, number: int, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._bad(number, text, "a JSON object")
        return found

    def _count(self, number: int, text: str, fields: Mapping[str, Any], name: str) -> int:
        value = fields.get(name)
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value[:SHOWN])
        if type(value) is not int or not 1 <= value <= MAX_TOKENS:
            raise self._bad(number, text, f"{name} from 1 to {MAX_TOKENS}")
        return value

    def _count_or_none(self, number: int, text: str, fields: Mapping[str, Any], name: str) -> int:
        """Return the count in an optional column. If the line has no value in this column, return
        0.
        """
        if fields.get(name) in (None, "", 0, "0"):
            return 0
        return self._count(number, text, fields, name)

    def _number(self, number: int, text: str, fields: Mapping[str, Any], name: str) -> float:
        value = fields.get(name)
        try:
            seconds = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            raise self._bad(number, text, f"{name} in seconds, 0 or later")
        return seconds

    def _bad(self, number: int, text: str, expected: str) -> ConfigError:
        found = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
        return ConfigError(f"{self._path}, line {number}: found {found!r}; expected {expected}")


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Requests that arrive at random, with lengths from lognormal distributions.

    Attributes:
        rate: mean number of arrivals per second.
        prompt_tokens, output_tokens: mean lengths in tokens. Lengths above a limit are reduced to
            the limit, so the real means can be smaller.
        max_total_tokens: maximum length of prompt and output together, in tokens.
        max_requests, max_seconds: the load ends when one of these limits is reached.
        seed: seed of the random numbers; equal seeds lead to equal loads.
    """

    rate: float
    prompt_tokens: float
    output_tokens: float
    max_total_tokens: int
    max_requests: float
    max_seconds: float
    seed: tuple[int, ...]

    def __iter__(self) -> Iterator[Arrival]:
        random = np.random.default_rng(self.seed)
        now_s, count = 0.0, 0
        while True:
            gaps = random.exponential(1 / self.rate, CHUNK)
            prompts = self._lengths(random, self.prompt_tokens)
            outputs = self._lengths(random, self.output_tokens)
            for gap, prompt, output in zip(gaps.tolist(), prompts, outputs, strict=True):
                now_s += gap
                if count >= self.max_requests or now_s > self.max_seconds:
                    return
                count += 1
                prompt = min(prompt, self.max_total_tokens - 1)
                yield Arrival(now_s, prompt, min(output, self.max_total_tokens - prompt))

    def _lengths(self, random: np.random.Generator, mean: float) -> list[int]:
        drawn = random.lognormal(math.log(mean) - SPREAD**2 / 2, SPREAD, CHUNK)
        lengths: list[int] = np.clip(np.rint(drawn), 1, MAX_TOKENS).astype(int).tolist()
        return lengths


def _either() -> str:
    return " for requests, or ".join([EXPECTED["requests"], EXPECTED["batches"]]) + " for batches"
