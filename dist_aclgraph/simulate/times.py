"""The assumed time of a step: a constant, plus a time per padded token.

Alternatively, the measured times in the report of a running deployment.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.choice import step_costs
from dist_aclgraph.planning.descriptor import RunMode

STEP_MS, TOKEN_MS, CAPTURE_MS = 10.0, 0.05, 50.0


@dataclass(frozen=True)
class StepTimes:
    """Seconds of steps and captures.

    Attributes:
        base_s: time of any step.
        token_s: time per token, padding included.
        capture_s: time of one capture, during which no step runs.
        measured: measured times by mode and bucket, which replace the formula. Other sizes are
            interpolated; larger sizes grow with their tokens.
        source: description in plain words.
    """

    base_s: float = STEP_MS / 1e3
    token_s: float = TOKEN_MS / 1e3
    capture_s: float = CAPTURE_MS / 1e3
    measured: Mapping[RunMode, Mapping[int, float]] = field(default_factory=dict)
    source: str = ""
    _known: dict[tuple[int, RunMode], float] = field(default_factory=dict, compare=False)

    def step_s(self, num_tokens: int, mode: RunMode) -> float:
        """Return the seconds of a step of so many tokens, padding included.

        A step without a graph takes as long as a graph of exactly its size.
        """
        key = num_tokens, mode
        if key not in self._known:
            self._known[key] = self._step_s(num_tokens, mode)
        return self._known[key]

    def _step_s(self, num_tokens: int, mode: RunMode) -> float:
        measured = self.measured.get(mode) or self._of_any_mode()
        if measured:
            return step_costs([num_tokens], measured)[0]
        return self.base_s + self.token_s * num_tokens

    def _of_any_mode(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for seconds in self.measured.values():
            for size, took in seconds.items():
                found[size] = max(took, found.get(size, 0.0))
        return found

    @property
    def in_words(self) -> str:
        eager = "a step without a graph takes what a graph of its size would"
        if self.measured:
            return f"step times are those of {self.source}; {eager}"
        return (
            f"step times are assumed, not measured: {self.base_s * 1e3:g} ms and "
            f"{self.token_s * 1e3:g} ms for each padded token; {eager}"
        )


def line_times(step_ms: float, token_ms: float, capture_ms: float) -> StepTimes:
    """Return times by the formula.

    Raises:
        ConfigError: steps would take no time, or negative time.
    """
    if step_ms < 0 or token_ms < 0 or capture_ms < 0 or step_ms + token_ms <= 0:
        raise ConfigError(
            f"a step of {step_ms:g} ms and {token_ms:g} ms for each token, a capture of "
            f"{capture_ms:g} ms: none may be negative, and a step must take some time"
        )
    return StepTimes(step_ms / 1e3, token_ms / 1e3, capture_ms / 1e3)


def read_times(path: Path, capture_ms: float) -> StepTimes:
    """Return the times in the report of a deployment, ``LLM.report()`` as JSON.

    Raises:
        ConfigError: the file cannot be read, is not a report, or its deployment replayed nothing.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot read the times {path}: {e.strerror}") from e
    except ValueError as e:
        raise ConfigError(f"the times {path} are not JSON: {e}") from e
    measured: defaultdict[RunMode, dict[int, float]] = defaultdict(dict)
    captures = []
    try:
        for bucket in _buckets(report):
            if bucket["step_seconds"] > 0:
                measured[bucket["mode"]][int(bucket["bucket"])] = float(bucket["step_seconds"])
            if bucket.get("capture_seconds", 0.0) > 0:
                captures.append(float(bucket["capture_seconds"]))
    except (KeyError, TypeError, ValueError) as e:
        raise ConfigError(
            f"{path} is no report of a deployment: its buckets need mode, bucket and step_seconds"
        ) from e
    if not measured:
        raise ConfigError(f"{path} has no bucket whose steps were timed: it replayed nothing")
    capture_s = sum(captures) / len(captures) if captures else capture_ms / 1e3
    return StepTimes(capture_s=capture_s, measured=dict(measured), source=str(path))


def _buckets(report: Any) -> Iterator[dict[str, Any]]:
    """Yield the buckets of a report, of one group or of several."""
    if isinstance(report, dict):
        yield from report.get("buckets", ())
        for group in report.get("groups", ()):
            yield from _buckets(group)
