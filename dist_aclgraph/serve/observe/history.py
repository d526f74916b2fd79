"""Stores the last ten minutes of /metrics for the status page.

Every few seconds, the metrics are collected. The changes since the last collection are stored as
one point: rates, and quantiles of the latencies. The number of points is limited.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from prometheus_client.core import Metric

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.serve.observe.metrics import PREFIX

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
SPAN_S = 600.0
POINTS_OF_A_CELL = 4  # number of points in one cell of the experts' heat map; a cell covers 20 s
QUANTILES = {"p50": 0.5, "p95": 0.95}
RATES = {"generation_tokens_per_s": "generation_tokens", "prompt_tokens_per_s": "prompt_tokens"}
REQUEST_RATES = {"requests_per_s": "request_success", "refused_per_s": "refused_requests"}
SUMS = {"running": "num_requests_running", "waiting": "num_requests_waiting"}
LATENCIES = {
    "time_to_first_token_s": "time_to_first_token_seconds",
    "inter_token_latency_s": "inter_token_latency_seconds",
}

ByEngine = Mapping[str, float]
# for each bucket, its upper bound, and the number of values up to this bound
Buckets = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class MetricCounts:
    """The counters at ``time_s``, a monotonic time.

    Attributes:
        engines: metric name -> engine -> value. The engine is "" for the ingress's own metrics.
        experts: engine -> rank -> tokens.
        latencies: histogram name -> buckets, ascending.
    """

    time_s: float
    engines: dict[str, dict[str, float]]
    experts: dict[str, dict[str, float]]
    latencies: dict[str, Buckets]


@dataclass(frozen=True)
class Point:
    """One point: the changes of the counters from the previous point's time to
    ``time_s``.

    Attributes:
        values: maps the name of each series to its value at this point; None if the value is
            unknown.
        experts: number of tokens that each rank's experts computed.
    """

    time_s: float
    values: dict[str, float | None]
    experts: dict[tuple[str, str], float]


class History:
    """Owns the points, and the thread that adds points while the engine client is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: MetricCounts | None = None
        self._points: deque[Point] = deque(maxlen=int(SPAN_S / PERIOD_S))

    def watch(self, collect: Callable[[], Iterable[Metric]], client: EngineClient) -> None:
        """Start to add a point every few seconds, until the engine client is closed. Returns at
        once.

        If the metrics cannot be collected, a point is missing. Only the first of several
        successive failures is logged.
        """

        def run() -> None:
            is_over = is_failing = False
            while not is_over:
                try:
                    self.add(read_counts(collect(), time.monotonic()))
                    is_failing = False
                except Exception:  # any exception: the next attempt may succeed
                    if not is_failing:
                        logger.exception("the history has no metrics")
                    is_failing = True
                is_over = client.wait_for_end(PERIOD_S)

        threading.Thread(target=run, name="history", daemon=True).start()

    def add(self, counts: MetricCounts) -> None:
        """Add a point with the changes since the last call."""
        with self._lock:
            if self._last is not None and counts.time_s > self._last.time_s:
                self._points.append(_point(self._last, counts))
            self._last = counts

    def report(self, now_s: float) -> dict[str, Any]:
        """Return all series as lists, oldest point first; ``ages_s`` has the age of each point."""
        with self._lock:
            points = list(self._points)
        names = points[-1].values if points else ()
        return {
            "span_s": SPAN_S,
            "ages_s": [round(now_s - point.time_s, 1) for point in points],
            "series": {name: [point.values.get(name) for point in points] for name in names},
            "experts": _loads(points),
        }


def read_counts(found: Iterable[Metric], time_s: float) -> MetricCounts:
    """Return the counters that points need, read from collected metrics."""
    counts = MetricCounts(time_s, {}, {}, {})
    sums = {*RATES.values(), *SUMS.values(), "kv_cache_usage"}
    for metric in found:
        name = metric.name.removeprefix(PREFIX)
        if name in sums:
            counts.engines[name] = {s.labels["engine"]: s.value for s in metric.samples}
        elif name in REQUEST_RATES.values():
            totals = (s.value for s in metric.samples if s.name.endswith("_total"))
            counts.engines[name] = {"": sum(totals)}
        elif name == "expert_tokens":
            for s in metric.samples:
                counts.experts.setdefault(s.labels["engine"], {})[s.labels["rank"]] = s.value
        elif name in LATENCIES.values():
            counts.latencies[name] = tuple(
                (float(s.labels["le"]), s.value)
                for s in metric.samples
                if s.name.endswith("_bucket")
            )
    return counts


def quantile(share: float, buckets: Buckets) -> float | None:
    """Return a quantile as Prometheus's ``histogram_quantile`` does; None if there are no
    observations.
    """
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    wanted = share * total
    for (low, below), (high, count) in pairwise(((0.0, 0.0), *buckets)):
        if count >= wanted:
            if high == float("inf"):
                return low
            return low + (high - low) * (wanted - below) / (count - below)
    return None


def _point(old: MetricCounts, new: MetricCounts) -> Point:
    elapsed_s = new.time_s - old.time_s
    values: dict[str, float | None] = {}
    for series, name in (RATES | REQUEST_RATES).items():
        gained = _gains(old.engines.get(name, {}), new.engines.get(name, {}))
        values[series] = sum(gained.values()) / elapsed_s if gained else None
    for series, name in SUMS.items():
        now = new.engines.get(name, {})
        values[series] = sum(now.values()) if now else None
    usage = new.engines.get("kv_cache_usage", {})
    values["kv_cache_usage"] = max(usage.values(), default=None)
    for series, name in LATENCIES.items():
        gained_buckets = _gained_buckets(old.latencies.get(name, ()), new.latencies.get(name, ()))
        for label, share in QUANTILES.items():
            values[f"{series}_{label}"] = quantile(share, gained_buckets)
    experts = {
        (engine, rank): gained
        for engine, ranks in new.experts.items()
        for rank, gained in _gains(old.experts.get(engine, {}), ranks).items()
    }
    return Point(new.time_s, values, experts)


def _gains(old: ByEngine, new: ByEngine) -> dict[str, float]:
    """Return the increase of each counter that both arguments contain. If a counter's value is
    lower than before, the counter has been reset to 0.
    """
    return {
        key: value - old[key] if value >= old[key] else value
        for key, value in new.items()
        if key in old
    }


def _gained_buckets(old: Buckets, new: Buckets) -> Buckets:
    if len(old) != len(new):
        return ()
    return tuple((high, count - was) for (high, count), (_, was) in zip(new, old, strict=True))


def _loads(points: list[Point]) -> dict[str, dict[str, list[int | None]]]:
    """Return each rank's tokens in percent of the mean over the ranks of its engine; None if the
    engine is idle.
    """
    starts = range(len(points) % POINTS_OF_A_CELL, len(points), POINTS_OF_A_CELL)
    cells = [points[start : start + POINTS_OF_A_CELL] for start in starts]
    ranks = points[-1].experts if points else {}
    loads: dict[str, dict[str, list[int | None]]] = {}
    for engine, rank in ranks:
        loads.setdefault(engine, {})[rank] = []
    for cell in cells:
        for engine, rows in loads.items():
            tokens = {
                rank: sum(point.experts.get((engine, rank), 0.0) for point in cell) for rank in rows
            }
            mean = sum(tokens.values()) / len(tokens)
            for rank, row in rows.items():
                row.append(round(100 * tokens[rank] / mean) if mean else None)
    return loads
