"""``make bench-simulate``: compare a load on emulated NPUs with the simulation of the same load.

The deployment serves a first load, in which step times are measured, and then a second load. Then
``simulate`` simulates the second load with the measured times. Steps and padding of deployment and
simulation should be equal, except for requests that arrive while the scheduler decides the first
step. The seconds should differ by less than 15 %.
"""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from benchmarks.command import run_command
from benchmarks.engine import DecodeEngine
from benchmarks.report import Table
from benchmarks.turns import ray_for
from benchmarks.workload import QUERY_S, SILENCE_S
from dist_aclgraph.errors import EngineDeadError
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.shapes.families import read_model_spec
from dist_aclgraph.shipped import shipped
from dist_aclgraph.simulate.load import Arrival
from dist_aclgraph.simulate.simulation import LoadOptions, simulate
from dist_aclgraph.simulate.times import read_times
from dist_aclgraph.steps.delta import RequestDelta

AIM = 0.15  # largest difference of the seconds, as a fraction
MAX_NUM_SEQS = 32


def draw(count: int, seed: int) -> list[Arrival]:
    """Return requests with many different lengths that arrive at once."""
    random = np.random.default_rng(seed)
    prompts, outputs = random.integers(20, 201, count), random.integers(20, 121, count)
    return [
        Arrival(0.0, *lengths) for lengths in zip(prompts.tolist(), outputs.tolist(), strict=True)
    ]


def serve(engine: DecodeEngine, name: str, load: Sequence[Arrival]) -> float:
    """Serve all requests, and return the seconds until the last of them has ended."""
    events: queue.SimpleQueue[RequestDelta] = queue.SimpleQueue()
    random = np.random.default_rng(len(load))
    vocab_size = read_model_spec(engine.config.model).vocab_size
    prompts = [random.integers(0, vocab_size, arrival.prompt_tokens).tolist() for arrival in load]
    start_s, num_open = time.perf_counter(), len(load)
    for index, (arrival, prompt) in enumerate(zip(load, prompts, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=arrival.output_tokens, ignore_eos=True)
        engine.client.submit(f"{name}-{index}", prompt, params, [], events.put)
    while num_open:
        delta = events.get(timeout=SILENCE_S)
        if delta.finish_reason == "error":
            raise EngineDeadError(delta.error)
        num_open -= delta.finish_reason is not None
    return time.perf_counter() - start_s


def report_of(engine: DecodeEngine) -> dict[str, Any]:
    (report,) = engine.client.query("report", QUERY_S).values()
    return dict(report)


def counts_of(report: dict[str, Any]) -> dict[str, float]:
    """Return the counters of a deployment that a simulation also has."""
    return {
        "replays": sum(bucket["replays"] for bucket in report["buckets"]),
        "eager steps": sum(report["eager_steps"].values()),
        "padded tokens": sum(bucket["padded_tokens"] for bucket in report["buckets"]),
    }


def simulated(engine: DecodeEngine, load: Sequence[Arrival], report: dict[str, Any]) -> Any:
    """Simulate a load with the step times of a report; return counters and seconds."""
    with TemporaryDirectory() as folder:
        trace, times = Path(folder) / "trace.jsonl", Path(folder) / "report.json"
        trace.write_text("\n".join(json.dumps(arrival._asdict()) for arrival in load))
        times.write_text(json.dumps(report))
        played = simulate(engine.config, LoadOptions(trace=trace), read_times(times, 0.0))
    (group,) = played["groups"]
    return {
        "replays": sum(group["replays"].values()),
        "eager steps": sum(group["eager_steps"].values()),
        "padded tokens": group["padded_tokens"],
        "seconds": group["seconds"],
    }


def main(
    requests: Annotated[int, typer.Option(min=16, help="requests of the load")] = 40,
    in_flight: Annotated[int, typer.Option(min=1, max=2, help="steps in flight")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Compare a load on emulated NPUs with its simulation."""
    engine = DecodeEngine(
        shipped("models") / "tiny-qwen3",
        MAX_NUM_SEQS,
        scheduler={"max_num_batched_tokens": 512, "steps_in_flight": in_flight},
        graph={"lazy": "off", "rebucket_s": 0.0},
    )
    load = draw(requests, 1)
    with ray_for([engine]), engine:
        for seed in (2, 3):
            serve(engine, f"first-{seed}", draw(requests, seed))
        before = counts_of(report_of(engine))
        seconds = serve(engine, "compared", load)
        report = report_of(engine)
    after = counts_of(report)
    real = {name: after[name] - before[name] for name in after} | {"seconds": seconds}
    played = simulated(engine, load, report)
    if as_json:
        print(json.dumps({"cores": os.cpu_count(), "real": real, "simulated": played}))
        return
    lines = [
        (name, f"{real[name]:,.4g}", f"{played[name]:,.4g}", f"{played[name] / real[name]:.2f}")
        for name in real
    ]
    console = Console()
    title = f"{requests} requests at once, {in_flight} in flight"
    console.print(Table(title, ("", "real", "simulated", "ratio"), lines).for_terminal())
    console.print(f"The aim: seconds within {AIM:.0%}. {os.cpu_count()} cores.")


if __name__ == "__main__":
    run_command(main)
