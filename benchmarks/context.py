"""``make bench-context``: the gains and the costs if ranks share the context of a request.

Eight ranks serve a small model with latent attention. First, the KV cache is divided into 1 to 8
shards (DCP). The bench measures the memory that a request uses on each rank, the length of the
longest request that can be served, the time of a decode step, and the step's host time. Second,
prompts are split over 1 to 4 ranks (PCP). The bench measures the time to the first token, and the
attention work of a rank. The bench also counts the bytes that ranks send to other ranks. The ranks
share this machine's cores, so the results are no measurements of an NPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import Progress

from benchmarks.common.checkpoints import LatentShape, write_checkpoint
from benchmarks.common.command import numbers, report_bench, run_command
from benchmarks.common.engine import DecodeEngine
from benchmarks.common.turns import Turns, ray_for, show_start, take_turns
from benchmarks.common.workload import (
    Run,
    decode_workload,
    median_stages,
    percentile,
    ratios,
    run_workload,
    step_ms,
)
from benchmarks.reports.context_report import draw, report
from dist_aclgraph.context.prompt_split import PromptSplit, share_of_work
from dist_aclgraph.kv.cache_spec import KVCacheSpec
from dist_aclgraph.shapes.model_facts import read_model_facts

DTYPE = "float32"  # most CPUs convert bfloat16 to float32 to compute
VOCAB, BLOCK_SIZE = 2048, 128
MAX_STEP_TOKENS = 8192  # large enough that one step computes a whole prompt
WARM_UP_STEPS = 4
ANSWER = 16  # number of output tokens of the longest requests
# The stages in which the host prepares and queues a step that replays a graph.
HOST = ("rows", "inputs", "upload", "lengths", "replay", "update")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The settings of the bench: numbers of shards, numbers of ranks over which prompts are split,
    and lengths in tokens.

    ``blocks`` is the number of KV blocks of a rank while the longest requests run.
    """

    shards: Sequence[int]
    prompt_ranks: Sequence[int]
    contexts: Sequence[int]
    prompts: Sequence[int]
    blocks: int
    steps: int
    repeats: int


def main(
    ranks: Annotated[int, typer.Option(help="Ranks of the largest deployments.")] = 8,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 2,
    shards: Annotated[str, typer.Option(help="Values of dcp; the first is the base.")] = "1,2,4,8",
    prompt_ranks: Annotated[str, typer.Option(help="Values of pcp, likewise.")] = "1,2,4",
    contexts: Annotated[str, typer.Option(help="Tokens before decode steps.")] = "256,1024,4096",
    prompts: Annotated[str, typer.Option(help="Tokens of prompts.")] = "2048,4096",
    blocks: Annotated[int, typer.Option(help="KV blocks for the longest request.")] = 8,
    steps: Annotated[int, typer.Option(help="Decode steps of a request.")] = 24,
    repeats: Annotated[int, typer.Option(help="Rounds: all deployments by turns.")] = 3,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
) -> None:
    """Measure, print and save."""
    sizes = Sizes(
        shards=numbers(shards),
        prompt_ranks=numbers(prompt_ranks),
        contexts=numbers(contexts),
        prompts=numbers(prompts),
        blocks=blocks,
        steps=steps,
        repeats=repeats,
    )
    report_bench(
        "context",
        out,
        lambda folder, bar: measure(folder, bar, ranks, layers, sizes),
        report,
        draw,
    )


def measure(folder: Path, bar: Progress, ranks: int, layers: int, sizes: Sizes) -> dict[str, Any]:
    """Serve the longest requests, measure decode steps, then prompts; return all measurements."""
    longest = max(sizes.shards) * sizes.blocks * BLOCK_SIZE
    max_len = max(longest, *sizes.contexts, *sizes.prompts) + sizes.steps + ANSWER
    shape = LatentShape(hidden=256, layers=layers, heads=8, ffn=512, vocab=VOCAB, max_len=max_len)
    path = write_checkpoint(shape, folder / shape.name, getattr(torch, DTYPE))
    prompt_tp = ranks // max(sizes.prompt_ranks)
    longest_engines = {n: _cache_engine(path, bar, ranks, n, sizes) for n in sizes.shards}
    decode_engines, host_engines = (
        {f"dcp {n}": _decode_engine(path, bar, ranks, n, sizes, kernels) for n in sizes.shards}
        for kernels in ("compute", "skip")
    )
    prompt_engines = {
        f"pcp {n}": _prompt_engine(path, bar, prompt_tp, n, sizes) for n in sizes.prompt_ranks
    }
    each = (longest_engines, decode_engines, host_engines, prompt_engines)
    with ray_for([engine for engines in each for engine in engines.values()]):
        caches = _serve_longest(longest_engines, sizes.blocks)
        decode = _turns(decode_engines, "context", sizes.contexts, sizes, bar)
        host = _turns(host_engines, "context", sizes.contexts, sizes, bar)
        prompts = _turns(prompt_engines, "prompt", sizes.prompts, sizes, bar)
    return {
        **decode.circumstances,
        "ranks": ranks,
        "prompt_tp": prompt_tp,
        "model": asdict(shape),
        "dtype": DTYPE,
        "steps": sizes.steps,
        "repeats": sizes.repeats,
        "caches": caches,
        "decodes": _decodes(decode, host, sizes),
        "prompts": _prompts(prompts, sizes),
    }


def _serve_longest(engines: dict[int, DecodeEngine], blocks: int) -> list[dict[str, Any]]:
    """Serve two requests with each number of shards. Each rank always has the same number of
    blocks.

    The first request is the longest request that fits in the cache with the fewest shards. The
    second request is the longest request that fits in the cache of its own deployment.
    """
    found: list[dict[str, Any]] = []
    for shards, engine in engines.items():
        with engine:
            longest = engine.deployment.reach().max_model_len
            common = found[0]["longest"] if found else longest
            runs = [
                run_workload(engine.client, name, decode_workload(1, n - ANSWER, ANSWER, VOCAB))
                for name, n in (("common", common), ("longest", longest))
            ]
        facts = read_model_facts(engine.config.model)
        spec = KVCacheSpec.from_config(engine.config, facts)
        used = [round(run.kv_usage * blocks) for run in runs]
        found.append(
            {
                "dcp": shards,
                "tokens": common,
                "kv_bytes": used[0] * spec.bytes_per_block,
                "cache_bytes": spec.total_bytes(blocks),
                "longest": longest,
                "longest_kv_bytes": used[1] * spec.bytes_per_block,
                "served": [len(run.tokens[0]) for run in runs],
            }
        )
    return found


def _cache_engine(path: Path, bar: Progress, tp: int, shards: int, sizes: Sizes) -> DecodeEngine:
    title, num_blocks = f"dcp {shards}, longest", sizes.blocks + 1  # + 1 for the dummy block
    return _make_engine(path, bar, title, {"tp": tp, "dcp": shards}, num_blocks)


def _decode_engine(
    path: Path, bar: Progress, tp: int, shards: int, sizes: Sizes, kernels: str
) -> DecodeEngine:
    return _make_engine(
        path,
        bar,
        f"dcp {shards}, kernels {kernels}",
        {"tp": tp, "dcp": shards},
        _blocks_for(max(sizes.contexts) + sizes.steps),
        kernels=kernels,
        prefix_cache=True,  # only decode steps are timed; later runs reuse the context's KV
    )


def _prompt_engine(
    path: Path, bar: Progress, tp: int, prompt_ranks: int, sizes: Sizes
) -> DecodeEngine:
    num_blocks = _blocks_for(max(sizes.prompts) + sizes.steps)
    parallel = {"tp": tp, "pcp": prompt_ranks}
    return _make_engine(path, bar, f"pcp {prompt_ranks}", parallel, num_blocks)


def _blocks_for(num_tokens: int) -> int:
    """Return the number of blocks, including the dummy block, that ``num_tokens`` tokens need in a
    cache without shards.
    """
    return -(-num_tokens // BLOCK_SIZE) + 1


def _turns(
    engines: dict[str, DecodeEngine], what: str, lens: Sequence[int], sizes: Sizes, bar: Progress
) -> Turns:
    warm_up, workloads = (
        {f"{what} {n}": decode_workload(1, n, steps, VOCAB) for n in lens}
        for steps in (WARM_UP_STEPS, sizes.steps)
    )
    return take_turns(engines, warm_up, workloads, sizes.repeats, bar)


def _make_engine(
    path: Path,
    bar: Progress,
    title: str,
    parallel: dict[str, int],
    num_blocks: int,
    *,
    kernels: str = "compute",
    prefix_cache: bool = False,
) -> DecodeEngine:
    return DecodeEngine(
        path,
        1,
        on_progress=show_start(bar, title),
        dtype=DTYPE,
        parallel=parallel,
        device={"emulator": {"kernels": kernels, "strict": False}},
        graph={"sizes": (1,), "lazy": "off", "rebucket_s": 0.0},
        scheduler={"max_num_batched_tokens": MAX_STEP_TOKENS, "prefix_cache": prefix_cache},
        max_model_len=None,
        kv={"block_size": BLOCK_SIZE, "num_blocks": num_blocks},
    )


def _decodes(decode: Turns, host: Turns, sizes: Sizes) -> list[dict[str, Any]]:
    """Return a row for each number of shards and each context length. Ratios compare a row with the
    row of the first number of shards.
    """
    base, *_ = decode.runs
    return [
        {
            "dcp": shards,
            "context": context,
            "step_ms": percentile([gap for run in runs[name] for gap in run.gaps_ms], 50),
            "step_ratio": ratios(step_ms(runs[name]), step_ms(decode.runs[base][name])),
            "skipped_step_ms": percentile([gap for run in skipped for gap in run.gaps_ms], 50),
            "host_us": statistics.median(_host_us(skipped)),
            "host_ratio": ratios(_host_us(skipped), _host_us(host.runs[base][name])),
            "stages_us": median_stages([run.stages_us for run in skipped]),
            **_sent(runs[name], "full"),
        }
        for shards, (deployment, runs) in zip(sizes.shards, decode.runs.items(), strict=True)
        for context, name in zip(sizes.contexts, runs, strict=True)
        if (skipped := host.runs[deployment][name])
    ]


def _prompts(turns: Turns, sizes: Sizes) -> list[dict[str, Any]]:
    """Return a row for each number of ranks that share a prompt, and each prompt length. Ratios
    compare a row with the row of a single rank.
    """
    base = next(iter(turns.runs.values()))
    return [
        {
            "pcp": ranks,
            "prompt": prompt,
            "first_token_ms": statistics.median(_first_token_ms(runs[name])),
            "first_token_ratio": ratios(_first_token_ms(runs[name]), _first_token_ms(base[name])),
            "work": work_of_ranks(prompt, ranks),
            "work_ratio": max(work_of_ranks(prompt, ranks))
            / max(work_of_ranks(prompt, sizes.prompt_ranks[0])),
            **_sent(runs[name], "eager"),
        }
        for ranks, runs in zip(sizes.prompt_ranks, turns.runs.values(), strict=True)
        for prompt, name in zip(sizes.prompts, runs, strict=True)
    ]


def work_of_ranks(num_tokens: int, num_ranks: int) -> list[int]:
    """A prompt of ``num_tokens`` tokens is split over ``num_ranks`` ranks, and computed in one
    step. Return the number of pairs (token, key) for which each rank computes attention.
    """
    lens = np.array([num_tokens], np.int32)
    split = PromptSplit.of(lens, num_ranks)
    return [share_of_work(pieces, np.zeros_like(lens), lens) for pieces in split.pieces]


def _host_us(runs: Sequence[Run]) -> list[float]:
    return [sum(run.stages_us.get(stage, 0.0) for stage in HOST) for run in runs]


def _first_token_ms(runs: Sequence[Run]) -> list[float]:
    return [run.first_token_s * 1e3 for run in runs]


def _sent(runs: Sequence[Run], mode: str) -> dict[str, float]:
    """Return how many collectives a rank runs in a step, and how many bytes it sends. These numbers
    are the same in all rounds.
    """
    return {what: runs[0].per_step(mode, what) for what in ("collectives", "collective_bytes")}


if __name__ == "__main__":
    run_command(main)
