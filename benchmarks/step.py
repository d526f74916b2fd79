"""``make bench-step``: the host time of each part of a decode step, if kernels do nothing.

The engine's scheduler and a worker's runner take turns in one process, without messages and
clients. All requests decode, so each request gets one token in each step. A row shows the 10th
percentile over all steps. Higher percentiles contain delays by other programs on the machine. The
results are from the emulator; they are not measurements of an NPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.common.checkpoints import Shape, write_checkpoint
from benchmarks.common.command import numbers, report_bench, run_command
from benchmarks.common.one_rank import OneRank
from benchmarks.common.report import Report, Table
from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.config import Config, make_config
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.device.step_measures import WORKER_STAGES
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.step import (
    RankPlan,
    RowSampling,
    StepResult,
    encoder,
    from_worker_decoder,
    to_worker_decoder,
)

PROMPT_TOKENS, MAX_LEN, NUM_BLOCKS = 100, 1024, 512
WARM_UP = 40  # number of steps that are not measured, including the steps of the prompts
ENGINE_PARTS = ("schedule", "encode the plan", "decode results", "take in")
# The ways of sampling. The keys are their names. The values are the sampling parameters of all
# requests, without the seed.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 0.8, "top_p": 0.9},
    "bias": {"biased": pack_ints([5, 7]), "biases": np.array([1, -1], np.float32).tobytes()},
    "allowed": {"allowed": pack_ints(range(100))},
    "penalty": {"presence_penalty": 0.5},
}
ROUNDS = 8  # number of turns that each way of sampling gets; each turn begins with new requests
NOTE = "emulated NPU on the CPU, kernels skipped; not an NPU figure"


def main(
    layers: Annotated[str, typer.Option(help="Of models.")] = "4,28",
    batches: Annotated[str, typer.Option(help="Requests that decode.")] = "1,8,32",
    steps: Annotated[int, typer.Option(help="That are measured.")] = 400,
    sampling: Annotated[str, typer.Option(help=f"By turns: {', '.join(WAYS)}.")] = "greedy",
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
) -> None:
    """Measure, print and save."""
    sizes = numbers(batches)
    ways = sampling.split(",")
    report_bench(
        "step",
        out,
        lambda folder, _: measure_all(folder, numbers(layers), sizes, steps, ways),
        report,
    )


def measure_all(
    folder: Path, layers: Sequence[int], sizes: tuple[int, ...], steps: int, ways: Sequence[str]
) -> dict[str, Any]:
    """Return the times of a step for each model, number of requests and way of sampling."""
    found: list[dict[str, Any]] = []
    for count in layers:
        npu, runner, config = make_worker(folder, count, sizes)
        for batch in sizes:
            for way, us in measure(npu, runner, config, batch, steps, ways).items():
                found.append({"layers": count, "batch": batch, "sampling": way, "us": us})
        runner.close()
    return {"note": NOTE, "rows": found}


def report(results: dict[str, Any]) -> Report:
    """Return a table with a row for each part of a step.

    There is one column for each combination of model, number of requests and way of sampling.
    """
    columns = {
        f"{row['layers']} x {row['batch']} {row['sampling']}": row["us"] for row in results["rows"]
    }
    parts = dict.fromkeys(part for us in columns.values() for part in us)
    lines = [[part, *(f"{us.get(part, 0.0):.0f}" for us in columns.values())] for part in parts]
    table = Table("Host time of a step, layers x requests", ["part, us", *columns], lines)
    return Report("Steps of an engine and a worker in one process", [table])


def make_worker(
    folder: Path, layers: int, sizes: tuple[int, ...]
) -> tuple[Npu, ModelRunner, Config]:
    """Return a group's only rank, in this process, with decode graphs for these batch sizes."""
    shape = Shape(hidden=512, layers=layers, heads=8, kv_heads=2, ffn=1024)
    path = write_checkpoint(shape, folder / shape.name, torch.bfloat16)
    rank, runner, config = make_rank(path, sizes)
    return rank.npu, runner, config


def make_rank(
    path: Path,
    sizes: tuple[int, ...],
    steps_in_flight: int = 1,
    kernels: str = "skip",
    memory_mb: int | None = None,
    prefix_cache: bool = False,
    graphs: Sequence[BatchDescriptor] = (),
    **settings: Any,
) -> tuple[OneRank, ModelRunner, Config]:
    """Return a group's only rank, in this process, with the checkpoint at ``path`` and with decode
    graphs for these batch sizes.

    Args:
        graphs: full graphs that are captured instead of the decode graphs.
        memory_mb: size of the device's memory, in MiB; None means the default.
        settings: further keys of the configuration.
    """
    emulated: dict[str, Any] = {"kernels": kernels, "strict": False}
    if memory_mb is not None:
        emulated["memory_mb"] = memory_mb
    config = make_config(
        {
            "model": str(path),
            "profile": True,
            "dtype": "bfloat16",
            "max_model_len": MAX_LEN,
            "scheduler": {
                "max_num_seqs": max(sizes),
                "prefix_cache": prefix_cache,
                "steps_in_flight": steps_in_flight,
            },
            "device": {"kind": "emulated", "emulator": emulated},
            **settings,
        }
    )
    rank = OneRank(config)
    queries = 1 + config.speculative.num_tokens
    graphs = graphs or [BatchDescriptor(n * queries, n, queries, "FULL") for n in sizes]
    runner = rank.make_runner(config, graphs, NUM_BLOCKS)
    for graph in sorted(graphs, key=lambda graph: -graph.num_tokens):
        runner.warm_up(graph)
        runner.capture(graph)
        runner.commit(graph)
    gc.collect()
    gc.freeze()
    return rank, runner, config


def make_scheduler(
    config: Config,
    batch: int,
    sizes: tuple[int, ...],
    steps: int,
    samplings: Sequence[Mapping[str, Any]],
    pool: BlockPool | None = None,
    family: GraphFamily | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Scheduler:
    """Return a scheduler whose requests all decode for the given number of steps.

    Args:
        family: graphs that are used instead of the decode graphs.
        samplings: for each request, the fields of its ``RowSampling``, without the seed.
        pool: the KV blocks; None means a new, empty pool.
    """
    num_drafts = config.speculative.num_tokens
    buckets = tuple(size * (1 + num_drafts) for size in sizes)
    decode = GraphFamily(run_mode="FULL", query_len=1 + num_drafts, buckets=buckets)
    plan = GraphPlan(
        version=1,
        mode="FULL_DECODE_ONLY" if family is None else "FULL",
        families=(family or decode,),
        max_num_seqs=config.scheduler.max_num_seqs,
        budget_model="legacy-last",
    )
    pools = [pool or BlockPool(NUM_BLOCKS, config.kv.block_size)]
    scheduler = Scheduler(
        config.scheduler,
        pools,
        GraphDispatcher(plan),
        max_model_len=MAX_LEN,
        num_drafts=num_drafts,
    )
    for index in range(batch):
        prompt = np.arange(prompt_tokens, dtype=np.int32) + index
        sampling = RowSampling(num_prompt_tokens=prompt_tokens, seed=index, **samplings[index])
        request = Request(str(index), prompt, sampling, max_tokens=steps, stop_token_ids=[])
        request.key = index
        scheduler.add(request)
    return scheduler


def measure(
    npu: Npu,
    runner: ModelRunner,
    config: Config,
    batch: int,
    steps: int,
    ways: Sequence[str],
) -> dict[str, dict[str, float]]:
    """Return the time of each part of a step, for each way of sampling.

    Each time is the 10th percentile over all measured steps, in microseconds. The ways of sampling
    take turns.
    """
    each: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way in ways:
            measured = -(-steps // ROUNDS)
            scheduler = make_scheduler(
                config, batch, (batch,), measured + 2 * WARM_UP, [WAYS[way]] * batch
            )
            each[way] += list(run_steps(npu, runner, scheduler, measured + WARM_UP))[WARM_UP:]
            while runner.is_busy:
                scheduler.update([runner.finish()])
    return {way: _percentiles(found) for way, found in each.items()}


def _percentiles(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    parts = [part for part in (*ENGINE_PARTS, *WORKER_STAGES) if part in each[0]]
    found = {part: _tenth([step[part] for step in each]) for part in parts}
    found["engine"] = _tenth([sum(step[part] for part in ENGINE_PARTS) for step in each])
    found["worker"] = _tenth(
        [sum(step[part] for part in parts if part in WORKER_STAGES) for step in each]
    )
    return found


def run_steps(
    npu: Npu, runner: ModelRunner, scheduler: Scheduler, steps: int
) -> Iterator[dict[str, float]]:
    """Run steps. For each step, yield the microseconds of each part of the engine's work and of the
    worker's work.
    """
    for _ in range(steps):
        laps, answered = [time.perf_counter()], list[StepResult]()
        plan = scheduler.schedule()
        laps.append(time.perf_counter())
        assert plan is not None
        data = encoder.encode(plan.for_rank(0))
        laps.append(time.perf_counter())
        message = to_worker_decoder.decode(data)
        assert isinstance(message, RankPlan)
        with npu.launching():
            runner.launch(message, 0, answered.append)
        answers = [encoder.encode(result) for result in answered]
        launched_s = time.perf_counter()
        results: list[Any] = [from_worker_decoder.decode(answer) for answer in answers]
        laps.append(laps[-1] + time.perf_counter() - launched_s)
        updating_s = time.perf_counter()
        scheduler.update(results)
        laps.append(laps[-1] + time.perf_counter() - updating_s)
        took = zip(ENGINE_PARTS, laps, laps[1:], strict=False)
        engine = {part: (end - begin) * 1e6 for part, begin, end in took}
        for result in results:
            assert isinstance(result, StepResult)
            yield {**engine, **result.timings_us}


def _tenth(values: list[float]) -> float:
    return sorted(values)[len(values) // 10]


if __name__ == "__main__":
    run_command(main)
