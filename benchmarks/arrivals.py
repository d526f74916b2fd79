"""``make bench-arrivals``: the time to the first token, with and without late decisions (ADR 36).

The time model (``docs/develop/device-time.md``) computes the device's times, and there are no
weights. The host does all work that serving requires. Two deployments of the same model take turns:
one with late decisions, one without. In a *burst*, requests follow each other within milliseconds
while no other request runs. In a *stream*, requests arrive one by one while other requests decode.
The results are no measurements of an NPU.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import Progress

from benchmarks.common.command import numbers, report_bench, run_command
from benchmarks.common.engine import NUM_WORDS, DecodeEngine
from benchmarks.common.report import Report, make_table
from benchmarks.common.turns import ray_for
from benchmarks.common.workload import SILENCE_S, percentile
from benchmarks.overlap import MODELS, modelled_engine
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.steps.delta import RequestDelta

MAX_BATCH, BURST, STREAMS, JOINING = 64, 32, 16, 40
BURST_GAP_S = 0.0003  # seconds between two requests of a burst
JOIN_GAPS_S = 0.02, 0.06  # minimum and maximum seconds between two requests that join
PROMPT, BURST_TOKENS, JOIN_TOKENS, STREAM_TOKENS = 32, 32, 4, 160
WAYS = {"at once": False, "late": True}


class Client:
    """Sends requests of random prompts, and records when their tokens arrive."""

    def __init__(self, engine: DecodeEngine) -> None:
        self._client = engine.client
        self._random = np.random.default_rng(0)
        self._events: queue.SimpleQueue[tuple[int, float, RequestDelta]] = queue.SimpleQueue()
        self._sent_s: list[float] = []

    def send(self, max_tokens: int) -> int:
        """Send one request. Return the request's number."""
        number = len(self._sent_s)
        prompt = self._random.integers(0, NUM_WORDS, PROMPT).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._sent_s.append(time.perf_counter())
        self._client.submit(f"{id(self)}-{number}", prompt, params, [], partial(self._note, number))
        return number

    def _note(self, number: int, delta: RequestDelta) -> None:
        self._events.put((number, time.perf_counter(), delta))

    def wait(self) -> tuple[list[float], list[list[float]]]:
        """Wait until all requests have ended.

        Returns:
            For each request, the time to its first token, and the times between its tokens, in ms.
        """
        times: list[list[float]] = [[] for _ in self._sent_s]
        num_open = len(times)
        while num_open:
            number, at_s, delta = self._events.get(timeout=SILENCE_S)
            if delta.token_ids:
                times[number].append(at_s)
            num_open -= delta.finish_reason is not None
        firsts = [(own[0] - sent) * 1e3 for own, sent in zip(times, self._sent_s, strict=True)]
        return firsts, [[(b - a) * 1e3 for a, b in pairwise(own)] for own in times]


def burst(engine: DecodeEngine) -> dict[str, list[float]]:
    """Return the times to the first token of requests that arrive almost together."""
    client = Client(engine)
    for _ in range(BURST):
        client.send(BURST_TOKENS)
        time.sleep(BURST_GAP_S)
    return {"burst": client.wait()[0]}


def stream(engine: DecodeEngine, seed: int) -> dict[str, list[float]]:
    """Let some requests decode while new requests arrive. Return the new requests' times to the
    first token, and the decoding requests' times between tokens.
    """
    client, random = Client(engine), np.random.default_rng(seed)
    for _ in range(STREAMS):
        client.send(STREAM_TOKENS)
    for _ in range(JOINING):
        time.sleep(random.uniform(*JOIN_GAPS_S))
        client.send(JOIN_TOKENS)
    firsts, gaps = client.wait()
    return {"join": firsts[STREAMS:], "gaps": [gap for own in gaps[:STREAMS] for gap in own]}


def measure(
    folder: Path, bar: Progress, names: Sequence[str], repeats: int, mode: str
) -> dict[str, Any]:
    """Return one row for each model, with and without late decisions."""
    engines = {
        (name, way): modelled_engine(
            folder,
            bar,
            f"{name}, {way}",
            MODELS[name],
            {"mode": mode},
            MAX_BATCH,
            late_decisions=is_late,
        )
        for name in names
        for way, is_late in WAYS.items()
    }
    found: dict[tuple[str, str], dict[str, list[float]]] = {key: {} for key in engines}
    task = bar.add_task("rounds", total=len(names) * (repeats + 1))
    with ray_for(list(engines.values())):
        for name in names:
            with engines[name, "at once"], engines[name, "late"]:
                for round_ in range(repeats + 1):
                    for load in (burst, partial(stream, seed=round_)):
                        for way in WAYS:
                            for what, values in load(engines[name, way]).items():
                                if round_:  # the first round warms up
                                    found[name, way].setdefault(what, []).extend(values)
                    bar.advance(task)
    rows = [
        {"model": name, "way": way}
        | {
            f"{what}_{p}": percentile(values, p)
            for what, values in got.items()
            for p in (50, 90, 99)
        }
        for (name, way), got in found.items()
    ]
    note = f"graph.mode {mode}; modelled device (A2), real host; not a figure of an NPU"
    return {"rows": rows, "repeats": repeats, "note": note}


def report(results: dict[str, Any]) -> Report:
    columns = {
        "model, decisions": "{model}, {way}",
        "burst p50, ms": "{burst_50:.1f}",
        "p90": "{burst_90:.1f}",
        "join p50, ms": "{join_50:.1f}",
        "p90 ": "{join_90:.1f}",
        "gap p50, ms": "{gaps_50:.2f}",
        "p99": "{gaps_99:.1f}",
    }
    table = make_table("Time to the first token, and gaps of others", columns, results["rows"])
    return Report("Time to the first token with and without late decisions", [table])


def main(
    models: Annotated[str, typer.Option(help="Their numbers in bench-overlap, from 0.")] = "1",
    repeats: Annotated[int, typer.Option(help="Rounds.")] = 4,
    mode: Annotated[str, typer.Option(help="Graph mode.")] = "FULL_AND_PIECEWISE",
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
) -> None:
    """Measure, print and save."""
    names = [list(MODELS)[index] for index in numbers(models)]
    report_bench(
        "arrivals", out, lambda folder, bar: measure(folder, bar, names, repeats, mode), report
    )


if __name__ == "__main__":
    run_command(main)
