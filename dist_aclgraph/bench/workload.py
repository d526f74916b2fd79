"""Requests that arrive by plan, and what came of them: step times, tokens, host time by stage."""

from __future__ import annotations

import itertools
import math
import queue
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dist_aclgraph.actors.engine_client import EngineClient
from dist_aclgraph.actors.messages import RequestDelta
from dist_aclgraph.errors import EngineDeadError
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.step import unpack_ints

SILENCE_S = 120.0
QUERY_S = 60.0
# Booked by the worker in parallel to a step's stages, or a second time under another name.
BESIDE = ("update_ahead", "update_per_layer", "update_wait")


@dataclass(frozen=True)
class Arrival:
    """One request; it is sent when the first request of its workload has ``at_token`` tokens."""

    prompt: list[int]
    max_tokens: int
    at_token: int = 0


@dataclass(frozen=True)
class Run:
    """What was measured from the moment when all that began the workload decoded, until the first
    request ended.

    Attributes:
        gaps_ms: between tokens of the first request: the steps.
        tokens: of each request, to its end.
        num_tokens, seconds: handed out to all requests, and in what time.
        timings_us: the engine's host time by mode and stage, and steps by mode.
        padded_tokens, live_tokens: of replayed steps.
    """

    gaps_ms: list[float]
    tokens: list[list[int]]
    num_tokens: int
    seconds: float
    timings_us: dict[str, float]
    padded_tokens: int
    live_tokens: int


def decode_workload(batch: int, prompt_len: int, steps: int, vocab: int) -> list[Arrival]:
    """Return ``batch`` equal requests that arrive at once; the first one ends first."""
    random = np.random.default_rng(batch)
    return [
        Arrival(random.integers(0, vocab, prompt_len).tolist(), steps + (8 if index else 0))
        for index in range(batch)
    ]


def mixed_workload(batch: int, prompt_len: int, steps: int, vocab: int) -> list[Arrival]:
    """Return ``batch`` requests that decode, and one more at every fourth token of the first:
    prompts of many lengths, answers of a few tokens.
    """
    random = np.random.default_rng(batch + 1000)
    later = [
        Arrival(random.integers(0, vocab, int(random.integers(3, 3 * prompt_len))).tolist(), 6, at)
        for at in range(2, steps - 2, 4)
    ]
    return decode_workload(batch, prompt_len, steps, vocab) + later


def run_workload(client: EngineClient, name: str, arrivals: Sequence[Arrival]) -> Run:
    """Send the requests, each in its time, and wait for the end of all.

    Args:
        name: begins the request ids; a new one for each run.

    Raises:
        EngineDeadError: a request failed, or nothing came for two minutes.
    """
    events: queue.SimpleQueue[tuple[int, float, RequestDelta]] = queue.SimpleQueue()

    def note(index: int, delta: RequestDelta) -> None:
        events.put((index, time.perf_counter(), delta))

    def submit(at_token: int) -> None:
        for index, arrival in enumerate(arrivals):
            if arrival.at_token == at_token:
                params = SamplingParams(
                    max_tokens=arrival.max_tokens, temperature=0.0, ignore_eos=True
                )
                request_id = f"{name}-{index}"
                client.submit(request_id, arrival.prompt, params, [], partial(note, index))

    tokens: list[list[int]] = [[] for _ in arrivals]
    times_s: list[list[float]] = [[] for _ in arrivals]
    beginners = [index for index, arrival in enumerate(arrivals) if arrival.at_token == 0]
    before: dict[str, Any] | None = None
    after: dict[str, Any] = {}
    num_open = len(arrivals)
    submit(0)
    while num_open:
        index, now_s, delta = _next(events)
        for token in unpack_ints(delta.token_ids).tolist():
            tokens[index].append(token)
            times_s[index].append(now_s)
            if index == 0:
                submit(len(tokens[0]))
        if before is None and all(tokens[beginner] for beginner in beginners):
            before = _counters(client)
        if delta.finish_reason is not None:
            num_open -= 1
            if index == 0:
                after = _counters(client)
    assert before is not None
    begin_s = max(times_s[index][0] for index in beginners)
    first = [t for t in times_s[0] if t >= begin_s]
    gained = Counter(after)
    gained.subtract(before)
    return Run(
        gaps_ms=[(b - a) * 1e3 for a, b in itertools.pairwise(first)],
        tokens=tokens,
        num_tokens=sum(begin_s < t <= first[-1] for times in times_s for t in times),
        seconds=first[-1] - begin_s,
        timings_us={key: gained[key] for key in after if "." in key},
        padded_tokens=gained["padded"],
        live_tokens=gained["live"],
    )


def _next(
    events: queue.SimpleQueue[tuple[int, float, RequestDelta]],
) -> tuple[int, float, RequestDelta]:
    try:
        index, now_s, delta = events.get(timeout=SILENCE_S)
    except queue.Empty:
        raise EngineDeadError(f"no token within {SILENCE_S:g} s") from None
    if delta.finish_reason == "error":
        raise EngineDeadError(delta.error)
    return index, now_s, delta


def _counters(client: EngineClient) -> dict[str, Any]:
    """Return the engine's counters, as they stand between two steps."""
    (report,) = client.query("report", QUERY_S)
    graph = report["metrics"]["graph"]
    return {
        **report["timings_us"],
        "padded": graph["padded_tokens"],
        "live": graph["live_tokens"],
    }


# ---- arithmetic


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of all are not above (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def padded_fraction(padded: int, live: int) -> float:
    """Return the share of replayed tokens that were padding; 0 where nothing replayed."""
    return padded / (padded + live) if padded + live else 0.0


def paired_ratio(base: Sequence[float], other: Sequence[float]) -> float:
    """Return the median, over rounds, of how often ``other`` goes into ``base``."""
    return statistics.median(a / b for a, b in zip(base, other, strict=True))


def mean_stages(timings_us: dict[str, float]) -> tuple[dict[str, float], dict[str, int]]:
    """Return microseconds a step by stage, over all modes of a run, and the steps of each mode."""
    total: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for key, value in timings_us.items():
        mode, _, stage = key.partition(".")
        if stage == "steps":
            steps[mode] += int(value)
        else:
            total[stage] += value  # type: ignore[assignment]
    count = sum(steps.values())
    stages = {stage: value / count for stage, value in total.items()}
    return stages, {mode: n for mode, n in steps.items() if n}


def median_stages(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median over runs of each stage; one that a run lacks took it no time."""
    names = dict.fromkeys(stage for run in runs for stage in run)
    return {name: statistics.median(run.get(name, 0.0) for run in runs) for name in names}
