"""``make bench-kv``: what copies of KV blocks in files gain, and what they cost.

An engine's scheduler and a worker's runner take turns in one process. The emulator's kernels
compute real values, so a prompt takes CPU time. This file measures three things. The first is the
time to the first token in three cases: the prompt's KV is computed, is in the device's cache, or is
in files. The second is the time between the tokens of decoding requests, while other prompts are
computed or read from files. The third is the time until all requests of a lost group have their
next tokens, with and without files. ``roles.py`` measures a fourth thing: long prompts with and
without a prefill group. The results are from the emulator; they are not measurements of an NPU.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import Progress

from benchmarks import roles
from benchmarks.common.checkpoints import Shape, write_checkpoint
from benchmarks.common.command import numbers, report_bench, run_command
from benchmarks.common.one_rank import OneRank
from benchmarks.common.report import Report, Table
from benchmarks.common.workload import percentile
from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.config import make_config
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.kv.block_files import BlockFiles
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.look_ups import look_ups_of
from dist_aclgraph.kv.tiers import KVTiers
from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.step import RowSampling, StepResult

VOCAB, BLOCK_SIZE, NUM_BLOCKS = 2048, 128, 256
MAX_STEP_TOKENS = 512
FILE_BYTES = 2 << 30  # maximum size of the files of each tier, in bytes
MEMORY, DISK = Path("/dev/shm"), Path.cwd()
NOTE = "emulated NPU on the CPU; not an NPU figure"
SECONDS = ("all_s", "median_s")
ALONE, COMPUTED, READ = "alone", "prompts are computed", "prompts are read"


@dataclass
class Service:
    """A rank with its scheduler and the files of its KV blocks.

    Attributes:
        gaps_ms: times between two successive steps in which requests decoded.
        first_s: for each request, the seconds from its submission to its first token.
    """

    rank: OneRank
    runner: ModelRunner
    plan: GraphPlan
    scheduler_config: Any
    tiers: KVTiers
    gaps_ms: list[float] = field(default_factory=list)
    first_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Empty the KV cache of the device, and keep the files."""
        self._sent_s: dict[str, float] = {}
        self._last_s = 0.0
        self.scheduler = Scheduler(
            self.scheduler_config,
            [BlockPool(NUM_BLOCKS, BLOCK_SIZE)],
            GraphDispatcher(self.plan),
            max_model_len=NUM_BLOCKS * BLOCK_SIZE // 2,
            look_ups=look_ups_of(self.tiers, None),
        )

    def add(self, name: str, prompt: IntArray, count: int) -> None:
        sampling = RowSampling(num_prompt_tokens=len(prompt), seed=0)
        self._sent_s[name] = time.perf_counter()
        self.scheduler.add(Request(name, prompt, sampling, max_tokens=count, stop_token_ids=[]))

    def turn(self) -> None:
        results: list[StepResult] = []
        with self.rank.npu.launching():
            if plan := self.scheduler.schedule():
                self.runner.launch(plan.for_rank(0), 0, results.append)
            elif self.runner.is_busy:
                results.append(self.runner.finish())
            (jobs,) = self.scheduler.copies.take_jobs(is_idle=not self.runner.is_busy)
            for number, num_whole in self.runner.copy_blocks(jobs):
                self.scheduler.copies.end(number, 0, num_whole)
        outputs = self.scheduler.update(results)
        now_s = time.perf_counter()
        for index in outputs.firsts.tolist():
            name = outputs.requests[index].request_id
            self.first_s[name] = now_s - self._sent_s[name]
        if len(outputs) > len(outputs.firsts):
            self.gaps_ms.append((now_s - self._last_s) * 1e3)
        self._last_s = now_s

    def finish(self) -> None:
        while self.scheduler.has_work or self.scheduler.copies.is_busy:
            self.turn()


def main(
    lengths: Annotated[str, typer.Option(help="Tokens of prompts.")] = "512,1024,2048,4096",
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    batch: Annotated[int, typer.Option(help="Number of decoding requests.")] = 8,
    steps: Annotated[int, typer.Option(help="Steps of each decoding request.")] = 300,
    rounds: Annotated[int, typer.Option(help="Rounds of each measurement.")] = 3,
    streams: Annotated[int, typer.Option(help="Requests of a lost group.")] = 64,
    stream_tokens: Annotated[int, typer.Option(help="Tokens of each of these.")] = 2048,
    roles_rounds: Annotated[int, typer.Option(help="Rounds with and without roles.")] = 4,
    roles_prompts: Annotated[int, typer.Option(help="Long prompts of such a round.")] = 10,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
) -> None:
    """Measure, print and save."""
    sizes = numbers(lengths)

    def run(folder: Path, bar: Progress) -> dict[str, Any]:
        with_roles = roles.measure(folder, bar, roles_rounds, roles_prompts, roles.STREAMS)
        shape = Shape(hidden=512, layers=layers, heads=8, kv_heads=2, ffn=1024)
        path = write_checkpoint(shape, folder / "model", torch.float32)
        roots = {
            "memory": MEMORY / f"bench-kv-{os.getpid()}",
            "disk": DISK / f".bench-kv-{os.getpid()}",
        }
        try:
            services = {name: make_service(path, batch, root) for name, root in roots.items()}
            total = rounds * (len(sizes) * len(roots) + 3) + 2
            task = bar.add_task("rounds", total=total)
            first = {
                size: first_tokens(services, size, rounds, lambda: bar.advance(task))
                for size in sizes
            }
            beside = decode_beside(
                services["memory"], batch, steps, max(sizes), rounds, lambda: bar.advance(task)
            )
            recovery = recover(
                services["memory"],
                roots["memory"],
                [prompt_of(stream_tokens, 100_000 + index) for index in range(streams)],
                lambda: bar.advance(task),
            )
        finally:
            for root in roots.values():
                remove(root)
        return {
            "note": NOTE,
            "first": first,
            "beside": beside,
            "recovery": recovery,
            "roles": with_roles,
        }

    report_bench("kv", out, run, report)


def remove(root: Path) -> None:
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()


def make_service(path: Path, batch: int, root: Path) -> Service:
    """Return a rank in this process. The files of its KV blocks are below ``root``."""
    config = make_config(
        {
            "model": str(path),
            "dtype": "float32",
            "max_model_len": NUM_BLOCKS * BLOCK_SIZE // 2,
            "scheduler": {
                "max_num_seqs": batch + 1,
                "max_num_batched_tokens": MAX_STEP_TOKENS,
                "steps_in_flight": 1,
            },
            "kv": {"block_size": BLOCK_SIZE, "host_gib": 1},
            "device": {"kind": "emulated", "emulator": {"strict": False, "memory_mb": 2048}},
        }
    )
    plan = GraphPlan(
        version=1,
        mode="FULL_DECODE_ONLY",
        families=(GraphFamily(run_mode="FULL", query_len=1, buckets=(batch, batch + 1)),),
        max_num_seqs=batch + 1,
        budget_model="legacy-last",
    )
    tiers = KVTiers({"files": BlockFiles(root, root / "rank", FILE_BYTES)})
    rank = OneRank(config)
    runner = rank.make_runner(config, plan.capture_order, NUM_BLOCKS, tiers=tiers)
    for graph in plan.capture_order:
        runner.warm_up(graph)
        runner.capture(graph)
        runner.commit(graph)
    return Service(rank, runner, plan, config.scheduler, tiers)


def prompt_of(length: int, seed: int) -> IntArray:
    return np.random.default_rng(seed).integers(0, VOCAB, length, dtype=np.int32)


def first_tokens(
    services: Mapping[str, Service], length: int, rounds: int, note: Any
) -> dict[str, float]:
    """Return the median time to the first token in ms, for each source of the prompt's KV."""
    each: dict[str, list[float]] = {}
    for seed in range(rounds):
        for where, service in services.items():
            prompt = prompt_of(length, seed + length)
            service.forget()
            for way in ("computed", "device"):
                service.add(way, prompt, 1)
                service.finish()
                each.setdefault(way, []).append(service.first_s[way])
            service.forget()
            service.add(where, prompt, 1)
            service.finish()
            assert service.scheduler.num_cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
            each.setdefault(where, []).append(service.first_s[where])
            note()
    return {way: statistics.median(times) * 1e3 for way, times in each.items()}


def decode_beside(
    service: Service, batch: int, steps: int, length: int, rounds: int, note: Any
) -> dict[str, dict[str, float]]:
    """Return the times between the tokens of decoding requests in three cases. ALONE: no other
    request runs. COMPUTED: prompts of ``length`` tokens are computed. READ: the KV of such prompts
    is read from files.

    In the last two cases, three requests with such prompts run one after another.
    """
    gaps: dict[str, list[float]] = {way: [] for way in (ALONE, COMPUTED, READ)}
    cpu_s: dict[str, float] = dict.fromkeys(gaps, 0.0)
    for number in range(rounds):
        for way, seen in gaps.items():
            service.forget()
            prompts = iter(() if way == ALONE else prompts_of(service, length, number, way))
            for index in range(batch):
                service.add(f"decode-{index}", prompt_of(BLOCK_SIZE // 2, 10_000 + index), steps)
            while not service.scheduler.ranks[0].rows.requests:
                service.turn()
            service.gaps_ms.clear()
            began_s, count, name = time.process_time(), 0, ""
            while any(each.request_id.startswith("decode") for each in service.scheduler.running):
                if (not name or name in service.first_s) and (
                    prompt := next(prompts, None)
                ) is not None:
                    service.first_s.pop(name := f"beside-{count}", None)
                    service.add(name, prompt, 1)
                    count += 1
                service.turn()
            cpu_s[way] += time.process_time() - began_s
            seen += service.gaps_ms
            service.finish()
            note()
    return {
        way: {
            "p50_ms": percentile(seen, 50),
            "p99_ms": percentile(seen, 99),
            "cpu_s": cpu_s[way] / rounds,
        }
        for way, seen in gaps.items()
    }


def prompts_of(service: Service, length: int, number: int, way: str) -> Iterator[IntArray]:
    """Yield three prompts. If ``way`` is READ, the KV of the prompts is in files. Otherwise the
    prompts are new.
    """
    prompts = [prompt_of(length, 1_000 * (number + 1) + index) for index in range(3)]
    if way == READ:
        for index, prompt in enumerate(prompts):
            service.add(f"first-{index}", prompt, 1)
        service.finish()
        service.forget()
    yield from prompts


def recover(
    service: Service, root: Path, prompts: list[IntArray], note: Any
) -> dict[str, dict[str, float]]:
    """Run the requests of a lost group again, first without files, and then with the files that the
    first run has written.

    Returns:
        Five values for each of the two runs. ``all_s``: seconds until all requests have their next
        tokens. ``median_s``: median time until a request has its next token, in seconds. ``read``:
        fraction of tokens whose KV was read from files. ``cpu_us``: CPU time per token, in
        microseconds. ``bytes``: number of bytes in files per token. Files are not written if there
        is no time or no room, so the KV of some tokens may be missing in the files.
    """
    num_tokens = sum(map(len, prompts))
    found: dict[str, dict[str, float]] = {}
    bytes_before = bytes_below(root)
    for way in (COMPUTED, READ):
        service.forget()
        service.first_s.clear()
        began_s = time.process_time()
        for index, prompt in enumerate(prompts):
            service.add(f"{index}", prompt, 1)
        service.finish()
        found[way] = {
            "all_s": max(service.first_s.values()),
            "median_s": statistics.median(service.first_s.values()),
            "read": service.scheduler.num_cached_tokens / num_tokens,
            "cpu_us": (time.process_time() - began_s) / num_tokens * 1e6,
            "bytes": (bytes_below(root) - bytes_before) / num_tokens,
        }
        note()
    return found


def bytes_below(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def report(results: dict[str, Any]) -> Report:
    first = results["first"]
    ways = list(next(iter(first.values())))
    lines = [
        [str(length), *(cell(row, way) for way in ways)]
        for length, row in ((length, first[length]) for length in first)
    ]
    beside = results["beside"]
    base = beside[ALONE]
    others = [
        [way, *(f"{row[key]:.2f} ({row[key] / base[key]:.2f})" for key in ("p50_ms", "p99_ms"))]
        for way, row in beside.items()
    ]
    recovery = results["recovery"]
    recovered = [
        [
            way,
            *(f"{row[key]:.1f} ({row[key] / recovery[COMPUTED][key]:.2f})" for key in SECONDS),
            f"{row['read']:.0%}",
            f"{row['cpu_us']:.0f}",
            f"{row['bytes']:.0f}",
        ]
        for way, row in recovery.items()
    ]
    tables = [
        Table("First token in ms (ratio to computed)", ["tokens", *ways], lines),
        Table("Between two tokens in ms (ratio to alone)", ["", "p50", "p99"], others),
        Table(
            "Next tokens of a lost group's requests (ratio to computed)",
            ["", "all, s", "median, s", "KV read", "CPU of a token, us", "bytes of a token"],
            recovered,
        ),
        roles.table(results["roles"]),
    ]
    return Report("Prompts computed, in the device's cache, and in files", tables)


def cell(row: Mapping[str, float], way: str) -> str:
    return f"{row[way]:.1f} ({row[way] / row['computed']:.2f})"


if __name__ == "__main__":
    run_command(main)
