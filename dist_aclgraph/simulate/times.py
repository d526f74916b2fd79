"""The times of steps in a simulation.

Times are either assumed or measured. An assumed time is a constant plus a time for each token,
including padding. Measured times are read from the report of a deployment.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.choice import step_costs
from dist_aclgraph.planning.descriptor import RunMode
from dist_aclgraph.planning.step_line import StepLine

STEP_MS, TOKEN_MS, CAPTURE_MS = 10.0, 0.05, 50.0


@dataclass(frozen=True)
class StepTimes:
    """Seconds of steps and captures.

    Attributes:
        base_s: seconds that each step takes, independent of its size.
        token_s: additional seconds for each token, including padding.
        eager: the times of steps without a graph. None means that such a step takes as long as a
            step of the same size with a graph.
        capture_s: seconds of one capture, during which no step runs.
        measured: measured seconds by mode and bucket, which are used instead of ``base_s`` and
            ``token_s``. Between two measured sizes, times are interpolated. Above the largest
            measured size, times are proportional to the number of tokens.
        source: a text that says where the measured times come from.
    """

    base_s: float = STEP_MS / 1e3
    token_s: float = TOKEN_MS / 1e3
    capture_s: float = CAPTURE_MS / 1e3
    eager: StepLine | None = None
    measured: Mapping[RunMode, Mapping[int, float]] = field(default_factory=dict)
    source: str = ""
    _known: dict[tuple[int, RunMode], float] = field(default_factory=dict, compare=False)

    def step_s(self, num_tokens: int, mode: RunMode) -> float:
        """Return how many seconds a step takes. ``num_tokens`` includes padding."""
        key = num_tokens, mode
        if key not in self._known:
            self._known[key] = self._step_s(num_tokens, mode)
        return self._known[key]

    def _step_s(self, num_tokens: int, mode: RunMode) -> float:
        if mode == "NONE" and self.eager is not None:
            return self.eager.at(num_tokens)
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
        if self.eager is not None:
            eager = (
                f"a step without a graph takes {self.eager.base_s * 1e3:.4g} ms, and "
                f"{self.eager.token_s * 1e3:.4g} ms for each token"
            )
        if self.measured:
            return f"step times are those of {self.source}; {eager}"
        return (
            f"step times are assumed, not measured: {self.base_s * 1e3:g} ms and "
            f"{self.token_s * 1e3:g} ms for each padded token; {eager}"
        )


def line_times(
    step_ms: float,
    token_ms: float,
    capture_ms: float,
    eager_step_ms: float | None = None,
    eager_token_ms: float | None = None,
) -> StepTimes:
    """Return assumed times, which consist of a constant and a time for each token.

    Args:
        eager_step_ms, eager_token_ms: the constant and the time per token for steps without a
            graph. None means the same value as for steps with a graph.

    Raises:
        ConfigError: a step would take no time, or a negative time.
    """
    eager_ms = StepLine(
        step_ms if eager_step_ms is None else eager_step_ms,
        token_ms if eager_token_ms is None else eager_token_ms,
    )
    for line in (StepLine(step_ms, token_ms), eager_ms):
        if min(*line, capture_ms) < 0 or sum(line) <= 0:
            raise ConfigError(
                f"a step of {line.base_s:g} ms and {line.token_s:g} ms for each token, a capture "
                f"of {capture_ms:g} ms: none may be negative, and a step must take some time"
            )
    is_same = eager_ms == (step_ms, token_ms)
    return StepTimes(
        step_ms / 1e3,
        token_ms / 1e3,
        capture_ms / 1e3,
        None if is_same else StepLine(eager_ms.base_s / 1e3, eager_ms.token_s / 1e3),
    )


def read_times(path: Path, capture_ms: float) -> StepTimes:
    """Read times from a deployment's report, a file that contains ``LLM.report()`` as JSON.

    Raises:
        ConfigError: the file cannot be read, is not a report, or contains no replayed graph.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot read the times {path}: {e.strerror}") from e
    except ValueError as e:
        raise ConfigError(f"the times {path} are not JSON: {e}") from e
    measured: defaultdict[RunMode, dict[int, float]] = defaultdict(dict)
    captures = []
    eager: list[tuple[int, StepLine]] = []
    try:
        for found in _groups(report):
            if times := found.get("eager_times"):
                line = StepLine(float(times["base_seconds"]), float(times["token_seconds"]))
                eager.append((int(times["steps"]), line))
            for bucket in found.get("buckets", ()):
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
    return StepTimes(
        capture_s=capture_s, eager=_mean(eager), measured=dict(measured), source=str(path)
    )


def _mean(lines: Sequence[tuple[int, StepLine]]) -> StepLine | None:
    """Return the mean of linear functions, weighted by their numbers of steps; None if there are no
    steps.
    """
    steps = sum(count for count, _ in lines)
    if not steps:
        return None
    return StepLine(
        sum(count * line.base_s for count, line in lines) / steps,
        sum(count * line.token_s for count, line in lines) / steps,
    )


def _groups(report: Any) -> Iterator[dict[str, Any]]:
    """Yield the report of each group in ``report``. ``report`` is the report of a deployment or of
    one group.
    """
    if isinstance(report, dict):
        yield report
        for group in report.get("groups", ()):
            yield from _groups(group)
