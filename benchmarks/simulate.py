"""``make bench-simulate``: compares loads on emulated NPUs with simulations of the same loads.

There are three cases: separate prompts, prompts that share contexts, and drafts. In each case, a
deployment serves a first load, in which step times are measured, and then a second load. Then
``simulate`` simulates the second load with the measured times. A load begins with a long prompt, so
that all other requests arrive while its first step runs. The deployment and the simulation must
have equal steps and equal padding. In the case with drafts, replays and padding may differ by 15 %,
because a simulation decides at random whether a draft is accepted. The total times must differ by
less than 15 % in all cases. The exit status is 1 if a case misses its aim.
"""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console

from benchmarks.common.command import run_command
from benchmarks.common.engine import DecodeEngine
from benchmarks.common.report import Table
from benchmarks.common.turns import ray_for
from benchmarks.common.workload import QUERY_S, SILENCE_S
from dist_aclgraph.errors import EngineDeadError
from dist_aclgraph.files.shipped import shipped
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.shapes.families import read_model_spec
from dist_aclgraph.simulate.load import Arrival
from dist_aclgraph.simulate.load_options import LoadOptions
from dist_aclgraph.simulate.simulation import simulate
from dist_aclgraph.simulate.times import read_times
from dist_aclgraph.steps.delta import RequestDelta

# Largest allowed relative difference of the total times. With drafts, the limit also applies to the
# numbers of replays and of padding tokens.
AIM = 0.15
MAX_NUM_SEQS = 32
FIRST = Arrival(0.0, 1000, 1)  # a long prompt; all other requests arrive during its first step
LATER_S = 1e-6  # simulated arrival time of all other requests: during the first step
LEAD_S = 0.005  # seconds between the first request and all others, for the first step to begin
NUM_CONTEXTS = 2

Counts = dict[str, float]


class Case(NamedTuple):
    """A deployment and its loads.

    Attributes:
        shared_tokens: length in tokens of the prefix that prompts share; 0 if they share none.
        num_drafts: number of drafts for each request and step.
    """

    name: str
    model: str
    shared_tokens: int = 0
    num_drafts: int = 0


CASES = (
    Case("separate prompts", "tiny-qwen3"),
    Case("shared contexts", "tiny-qwen3", shared_tokens=256),
    Case("drafts", "tiny-deepseek", num_drafts=1),
)


def draw(count: int, seed: int, shared_tokens: int = 0) -> list[Arrival]:
    """Return a long prompt, and then requests with many different lengths."""
    random = np.random.default_rng(seed)
    prompts, outputs = random.integers(20, 201, count), random.integers(20, 121, count)
    return [
        FIRST,
        *(
            Arrival(LATER_S, shared_tokens + prompt, output, i % NUM_CONTEXTS, shared_tokens)
            for i, (prompt, output) in enumerate(
                zip(prompts.tolist(), outputs.tolist(), strict=True)
            )
        ),
    ]


def serve(engine: DecodeEngine, name: str, load: Sequence[Arrival]) -> float:
    """Serve all requests. Return the number of seconds until the last request has ended."""
    events: queue.SimpleQueue[RequestDelta] = queue.SimpleQueue()
    random = np.random.default_rng(len(load))
    vocab_size = read_model_spec(engine.config.model).vocab_size
    contexts = [random.integers(0, vocab_size, FIRST.prompt_tokens) for _ in range(NUM_CONTEXTS)]
    prompts = [
        [
            *contexts[arrival.shared][: arrival.shared_tokens].tolist(),
            *random.integers(0, vocab_size, arrival.prompt_tokens - arrival.shared_tokens).tolist(),
        ]
        for arrival in load
    ]
    start_s, num_open = time.perf_counter(), len(load)
    for index, (arrival, prompt) in enumerate(zip(load, prompts, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=arrival.output_tokens, ignore_eos=True)
        engine.client.submit(f"{name}-{index}", prompt, params, [], events.put)
        if not index:
            time.sleep(LEAD_S)
    while num_open:
        delta = events.get(timeout=SILENCE_S)
        if delta.finish_reason == "error":
            raise EngineDeadError(delta.error)
        num_open -= delta.finish_reason is not None
    return time.perf_counter() - start_s


def report_of(engine: DecodeEngine) -> dict[str, Any]:
    (report,) = engine.client.query("report", QUERY_S).values()
    return dict(report)


def counts_of(report: dict[str, Any]) -> Counts:
    """Return the counters of a deployment's report that a simulation also counts."""
    return {
        "replays": sum(bucket["replays"] for bucket in report["buckets"]),
        "eager steps": sum(report["eager_steps"].values()),
        "padded tokens": sum(bucket["padded_tokens"] for bucket in report["buckets"]),
    }


def accepted_of(report: dict[str, Any]) -> float | None:
    """Return the fraction of drafts that were accepted; None if there were no drafts."""
    drafts = report["metrics"]["spec_decode_num_draft_tokens"]
    return report["metrics"]["spec_decode_num_accepted_tokens"] / drafts if drafts else None


def simulated(engine: DecodeEngine, load: Sequence[Arrival], report: dict[str, Any]) -> Counts:
    """Simulate a load with the step times of a report. Return the simulation's counters and
    seconds.
    """
    with TemporaryDirectory() as folder:
        trace, times = Path(folder) / "trace.jsonl", Path(folder) / "report.json"
        trace.write_text("\n".join(json.dumps(arrival._asdict()) for arrival in load))
        times.write_text(json.dumps(report))
        options = LoadOptions(trace=trace, accepted=accepted_of(report))
        played = simulate(engine.config, options, read_times(times, 0.0))
    (group,) = played["groups"]
    return {
        "replays": sum(group["replays"].values()),
        "eager steps": sum(group["eager_steps"].values()),
        "padded tokens": group["padded_tokens"],
        "seconds": group["seconds"],
    }


def compare(case: Case, requests: int, in_flight: int) -> tuple[Counts, Counts]:
    """Run a case. Return counters and seconds, first of the deployment, then of the simulation."""
    engine = DecodeEngine(
        shipped("models") / case.model,
        MAX_NUM_SEQS,
        scheduler={
            "max_num_batched_tokens": 512,
            "steps_in_flight": in_flight,
            "late_decisions": False,  # ``simulate`` does not model them
            "prefix_cache": case.shared_tokens > 0,
        },
        speculative={"num_tokens": case.num_drafts},
        graph={"lazy": "off", "rebucket_s": 0.0},
    )
    load = draw(requests, 1, case.shared_tokens)
    with ray_for([engine]), engine:
        for seed in (2, 3):
            serve(engine, f"first-{seed}", draw(requests + seed, seed, case.shared_tokens))
        before = counts_of(report_of(engine))
        seconds = serve(engine, "compared", load)
        report = report_of(engine)
    after = counts_of(report)
    real = {name: after[name] - before[name] for name in after} | {"seconds": seconds}
    return real, simulated(engine, load, report)


def missed(case: Case, real: Counts, played: Counts) -> list[str]:
    """Return the names of the counters and times that differ too much between simulation and
    deployment.
    """
    exact = {"replays", "eager steps", "padded tokens"}
    close = {"seconds"}
    if case.num_drafts:
        exact, close = set(), {"replays", "padded tokens", "seconds"}
    return [
        name
        for name in real
        if (name in exact and played[name] != real[name])
        or (name in close and abs(played[name] - real[name]) > AIM * real[name])
    ]


def main(
    requests: Annotated[int, typer.Option(min=16, help="requests of the load")] = 40,
    in_flight: Annotated[int, typer.Option(min=1, max=2, help="steps in flight")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Compare loads on emulated NPUs with their simulation."""
    found = {case: compare(case, requests, in_flight) for case in CASES}
    misses = {case.name: missed(case, *numbers) for case, numbers in found.items()}
    if as_json:
        cases = {
            case.name: {"real": real, "simulated": played, "missed": misses[case.name]}
            for case, (real, played) in found.items()
        }
        print(json.dumps({"cores": os.cpu_count(), "cases": cases}))
    else:
        console = Console()
        for case, (real, played) in found.items():
            lines = [
                (
                    f"{name}{' (missed)' if name in misses[case.name] else ''}",
                    f"{real[name]:,.4g}",
                    f"{played[name]:,.4g}",
                    f"{played[name] / real[name]:.2f}" if real[name] else "",
                )
                for name in real
            ]
            title = f"{case.name}: {requests} requests, {in_flight} steps in flight"
            console.print(Table(title, ("", "real", "simulated", "ratio"), lines).for_terminal())
        console.print(f"The aim: equal steps, seconds within {AIM:.0%}. {os.cpu_count()} cores.")
    raise typer.Exit(1 if any(misses.values()) else 0)


if __name__ == "__main__":
    run_command(main)
