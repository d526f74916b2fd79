"""Sends requests according to a plan, and measures step times, tokens, and the host time of each
stage.
"""

from __future__ import annotations

import itertools
import math
import queue
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.errors import DistAclGraphError, EngineDeadError
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.steps.delta import RequestDelta

SILENCE_S = 120.0
QUERY_S = 60.0
# Names of times that overlap the stages of a step, or that are a part of a stage.
BESIDE = ("update_ahead", "update_per_layer", "update_wait")


@dataclass(frozen=True)
class Arrival:
    """One request, which is sent when the workload's first request has ``at_token`` tokens."""

    prompt: list[int]
    max_tokens: int
    at_token: int = 0


class Delivery(NamedTuple):
    """The tokens that one request got from one step."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True)
class Run:
    """The measurements of one run. They begin when all initial requests decode, and end when the
    first of these requests ends.

    Attributes:
        gaps_ms: times between two deliveries to the same request, in ms. These are the step times.
        tokens: all tokens of each request.
        num_tokens, num_deliveries, seconds: number of tokens in all deliveries, number of
            deliveries (one for each request and step), and duration of the measurements.
        timings_us: the engine's host time for each mode and stage, in microseconds, and the number
            of steps of each mode.
        padded_tokens, live_tokens: number of padding tokens, and number of other tokens, in steps
            that replayed a graph.
        num_drafted: how many times the drafts of a request were verified.
        accepted: [num_drafts], for each draft position: how many times the draft at this position
            was accepted.
        expert_tokens: number of tokens that the experts of each rank computed.
        num_reruns: number of steps that were repeated.
        kv_usage: fraction of the KV blocks that were in use when all initial requests had begun to
            decode.
        first_token_s: seconds from the submission of the first request until its first token.
        counted: for each mode, the number of steps since the first request was sent. If the device
            counts collectives, also the number and the bytes of the collectives of one rank.
    """

    gaps_ms: list[float]
    tokens: list[list[int]]
    num_tokens: int
    num_deliveries: int
    seconds: float
    timings_us: dict[str, float]
    padded_tokens: int
    live_tokens: int
    num_drafted: int
    accepted: list[int]
    expert_tokens: list[int]
    num_reruns: int
    kv_usage: float
    first_token_s: float
    counted: dict[str, dict[str, float]]

    @property
    def step_ms(self) -> float:
        """The median time between two tokens of a request, as a client sees it."""
        return percentile(self.gaps_ms, 50)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def stages_us(self) -> dict[str, float]:
        """Return the mean host time of a step for each stage."""
        return mean_stages(self.timings_us)[0]

    def per_step(self, mode: str, what: str) -> float:
        """Return the count ``what`` per step of the mode; 0 if nothing was counted."""
        counted = self.counted[mode]
        return counted.get(what, 0) / counted["steps"]


def decode_workload(batch: int, prompt_len: int, steps: int, vocab: int) -> list[Arrival]:
    """Return a batch of equal requests that arrive together. The first request ends first."""
    random = np.random.default_rng(batch)
    return [
        Arrival(random.integers(0, vocab, prompt_len).tolist(), steps + (8 if index else 0))
        for index in range(batch)
    ]


def mixed_workload(batch: int, prompt_len: int, steps: int, vocab: int) -> list[Arrival]:
    """Return a batch of requests that decode, and further requests.

    After every fourth token of the first request, one further request arrives. The further requests
    have prompts of many lengths and outputs of a few tokens.
    """
    random = np.random.default_rng(batch + 1000)
    later = [
        Arrival(random.integers(0, vocab, int(random.integers(3, 3 * prompt_len))).tolist(), 6, at)
        for at in range(2, steps - 2, 4)
    ]
    return decode_workload(batch, prompt_len, steps, vocab) + later


def run_workload(
    client: EngineClient, name: str, arrivals: Sequence[Arrival], **sampling: Any
) -> Run:
    """Send each request when it is due, and wait until all requests have ended.

    Args:
        name: prefix of the request ids. Two runs must not have the same name.
        sampling: sampling parameters of all requests. By default, sampling is greedy.

    Raises:
        EngineDeadError: a request failed, or the engine sent no message for two minutes.
    """
    events: queue.SimpleQueue[tuple[int, float, RequestDelta]] = queue.SimpleQueue()

    def note(index: int, delta: RequestDelta) -> None:
        events.put((index, time.perf_counter(), delta))

    def submit(at_token: int) -> None:
        for index, arrival in enumerate(arrivals):
            if arrival.at_token == at_token:
                own = {"temperature": 0.0, "max_tokens": arrival.max_tokens, "ignore_eos": True}
                params = SamplingParams(**{**own, **sampling})
                request_id = f"{name}-{index}"
                client.submit(request_id, arrival.prompt, params, [], partial(note, index))

    tokens: list[list[int]] = [[] for _ in arrivals]
    deliveries: list[list[Delivery]] = [[] for _ in arrivals]
    beginners = [index for index, arrival in enumerate(arrivals) if arrival.at_token == 0]
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    first_to_end = -1
    num_open = len(arrivals)
    start, start_s = _counters(client), time.perf_counter()
    submit(0)
    while num_open:
        index, now_s, delta = _next(events)
        new = unpack_ints(delta.token_ids).tolist()
        if new:
            deliveries[index].append(Delivery(now_s, len(new)))
        for token in new:
            tokens[index].append(token)
            if index == 0:
                submit(len(tokens[0]))
        if not before and all(tokens[beginner] for beginner in beginners):
            before = _counters(client)
        if delta.finish_reason is not None:
            num_open -= 1
            if first_to_end < 0 and index in beginners:
                first_to_end = index
                after = _counters(client)
    assert before and after
    begin_s = max(deliveries[index][0].at_s for index in beginners)
    steps_s, counts = whole_steps(deliveries, begin_s, first_to_end)
    gained = {key: value - before.get(key, 0) for key, value in after.items()}
    return Run(
        gaps_ms=[(b - a) * 1e3 for a, b in itertools.pairwise(steps_s)],
        tokens=tokens,
        num_tokens=sum(counts),
        num_deliveries=len(counts),
        seconds=steps_s[-1] - steps_s[0],
        timings_us=_part(gained, "timings"),
        padded_tokens=int(gained["padded"]),
        live_tokens=int(gained["live"]),
        num_drafted=int(gained["drafted"]),
        accepted=[int(n) for n in _part(gained, "accepted").values()],
        expert_tokens=[int(n) for n in _part(gained, "experts").values()],
        num_reruns=int(gained["reruns"]),
        kv_usage=before["kv_usage"],
        first_token_s=deliveries[0][0].at_s - start_s,
        counted=_by_mode({key: value - start.get(key, 0) for key, value in after.items()}),
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


def _counters(client: EngineClient) -> dict[str, float]:
    """Return the engine's counters. Their values are from the time between two steps."""
    (report,) = client.query("report", QUERY_S).values()
    metrics = report["metrics"]
    parts = {
        "timings": report["timings_us"],
        "counted": report["counted"],
        "accepted": metrics["spec_decode_num_accepted_tokens_per_pos"],
        "experts": metrics["expert_tokens"],
    }
    return {
        **{f"{part}/{key}": value for part, found in parts.items() for key, value in found.items()},
        "padded": metrics["graph"]["padded_tokens"],
        "live": metrics["graph"]["live_tokens"],
        "drafted": metrics["spec_decode_num_drafts"],
        "reruns": metrics["step_reruns"],
        "kv_usage": metrics["kv_cache_usage"],
    }


def _part(counters: dict[str, float], part: str) -> dict[str, float]:
    start = f"{part}/"
    return {key.removeprefix(start): n for key, n in counters.items() if key.startswith(start)}


def _by_mode(gained: dict[str, float]) -> dict[str, dict[str, float]]:
    steps = {key: n for key, n in _part(gained, "timings").items() if key.endswith(".steps")}
    return _by_mode_and_stage({**steps, **_part(gained, "counted")})


def _by_mode_and_stage(counts: dict[str, float]) -> dict[str, dict[str, float]]:
    """Convert counts with keys ``mode.stage`` to a mapping from mode and stage to the count."""
    modes: dict[str, dict[str, float]] = {}
    for key, count in counts.items():
        mode, _, stage = key.partition(".")
        modes.setdefault(mode, {})[stage] = count
    return modes


# ---- arithmetic


def whole_steps(
    deliveries: Sequence[Sequence[Delivery]], begin_s: float, index: int
) -> tuple[list[float], list[int]]:
    """Return two lists: the times of one request's deliveries from ``begin_s`` on, and numbers of
    tokens.

    The second list contains the number of tokens of each delivery between the first and the last of
    these times, for all requests. This list covers a whole number of steps: between two successive
    deliveries to one request, every other request gets exactly one delivery.

    Raises:
        DistAclGraphError: the request got its last token before ``begin_s``.
    """
    steps_s = [delivery.at_s for delivery in deliveries[index] if delivery.at_s >= begin_s]
    if not steps_s:
        raise DistAclGraphError(
            "a request ended before all requests had a token, so no step can be measured: prompts "
            "took too long on this machine; decode more tokens"
        )
    counts = [n for each in deliveries for at_s, n in each if steps_s[0] < at_s <= steps_s[-1]]
    return steps_s, counts


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile by nearest rank: at least ``percent`` % of all values are at most the
    returned value.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def padded_fraction(padded: int, live: int) -> float:
    """Return the fraction of replayed tokens that are padding; 0 if no graph was replayed."""
    return padded / (padded + live) if padded + live else 0.0


def paired_ratio(base: Sequence[float], other: Sequence[float]) -> float:
    """Divide the value of ``base`` by the value of ``other`` in each round. Return the median of
    these ratios.
    """
    return statistics.median(round_ratios(base, other))


def round_ratios(base: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return ``base`` divided by ``other`` for each round."""
    return [a / b for a, b in zip(base, other, strict=True)]


def ratios(ours: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Divide the value of ``ours`` by the value of ``base`` in each round. Return the ratios and
    their median.
    """
    return {"rounds": round_ratios(ours, base), "median": paired_ratio(ours, base)}


def step_ms(runs: Sequence[Run]) -> list[float]:
    """Return, for each run, the median time between two tokens."""
    return [run.step_ms for run in runs]


def mean_stages(timings_us: dict[str, float]) -> tuple[dict[str, float], dict[str, int]]:
    """Return two mappings: the mean time of each stage in microseconds per step, over all modes;
    and the number of steps of each mode.
    """
    modes = _by_mode_and_stage(timings_us)
    steps = {mode: int(found["steps"]) for mode, found in modes.items() if found.get("steps")}
    stages: dict[str, float] = {}
    for mode in steps:
        for stage, value in modes[mode].items():
            if stage != "steps":
                stages[stage] = stages.get(stage, 0.0) + value / sum(steps.values())
    return stages, steps


def median_stages(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return, for each stage, the median over the runs. If a run lacks a stage, its time counts as
    zero.
    """
    names = dict.fromkeys(stage for run in runs for stage in run)
    return {name: statistics.median(run.get(name, 0.0) for run in runs) for name in names}
