"""``make bench-hybrid``: compares three models of equal width: their decode steps, their caches,
and prompts with cached prefixes.

The models have random weights and the same number of layers. The first model is dense. The second
is a hybrid, with linear attention in three of four layers. The third is sparse: its latent
attention uses only keys that an indexer chooses. The models take turns in one process. Kernels do
nothing, so all times are host times. The results are from the emulator; they are not measurements
of an NPU.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import Progress

from benchmarks.common.command import report_bench, run_command
from benchmarks.common.one_rank import OneRank
from benchmarks.common.report import Report, Table
from benchmarks.step import NOTE, NUM_BLOCKS, make_rank, make_scheduler, measure
from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.config import Config
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.cache_spec import KVCacheSpec
from dist_aclgraph.kv.checkpoints import make_checkpoints
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.shapes.model_facts import read_model_facts
from dist_aclgraph.steps.step import RowSampling, StepResult

CONTEXTS = {"1k": 1 << 10, "32k": 32 << 10, "128k": 128 << 10}
# At the end of the prefix, a KV block is full, and a checkpoint stores the recurrent state.
PROMPT_TOKENS, PREFIX_TOKENS = 600, 512
EQUAL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": max(CONTEXTS.values()),
    "tie_word_embeddings": False,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["Qwen3ForCausalLM"], **HEADS},
    "hybrid": {
        "architectures": ["Qwen3_5ForCausalLM"],
        **HEADS,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "sparse": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "num_key_value_heads": 8,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_n_heads": 8,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
}


@dataclass(frozen=True)
class Candidate:
    """A model of the bench, and the rank that runs it."""

    rank: OneRank
    runner: ModelRunner
    config: Config

    @property
    def cache(self) -> KVCacheSpec:
        return KVCacheSpec.from_config(self.config, read_model_facts(self.config.model))


def main(
    layers: Annotated[int, typer.Option(help="Of each model; a multiple of 4.")] = 8,
    batch: Annotated[int, typer.Option(help="Requests that decode.")] = 8,
    steps: Annotated[int, typer.Option(help="That are measured in each round.")] = 80,
    rounds: Annotated[int, typer.Option(help="Turns of each model.")] = 5,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
) -> None:
    """Measure, print and save."""

    def run(folder: Path, bar: Progress) -> dict[str, Any]:
        models = {name: make_candidate(folder / name, name, layers, batch) for name in MODELS}
        return {"note": NOTE, "rows": measure_all(models, batch, steps, rounds, bar)}

    report_bench("hybrid", out, run, report)


def make_candidate(folder: Path, name: str, layers: int, batch: int) -> Candidate:
    folder.mkdir(parents=True)
    config = {**EQUAL, **MODELS[name], "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return Candidate(*make_rank(folder, (batch,), prefix_cache=True, weights="dummy"))


def measure_all(
    models: Mapping[str, Candidate], batch: int, steps: int, rounds: int, bar: Progress
) -> dict[str, dict[str, float]]:
    """Return the times and counts of each model. Times are medians over the rounds, in µs."""
    times: dict[str, dict[str, list[float]]] = {}
    task = bar.add_task("rounds", total=rounds)
    for number in range(rounds):
        for name, model in models.items():
            for what, us in measure_times(model, batch, steps, number).items():
                times.setdefault(what, {}).setdefault(name, []).append(us)
        bar.advance(task)
    found = {
        what: {name: statistics.median(each) for name, each in row.items()}
        for what, row in times.items()
    }
    counts = {name: measure_counts(model, batch) for name, model in models.items()}
    for what in counts["dense"]:
        found[what] = {name: each[what] for name, each in counts.items()}
    return found


def measure_times(model: Candidate, batch: int, steps: int, seed: int) -> dict[str, float]:
    """Return the host times of a decode step, of a prompt without a cached prefix, and of a prompt
    with a cached prefix.
    """
    us = measure(model.rank.npu, model.runner, model.config, batch, steps, ["greedy"])["greedy"]
    scheduler = _scheduler_with_prefixes(model)
    tokens = np.random.default_rng(seed).integers(0, 8192, PROMPT_TOKENS, dtype=np.int32)
    cold, hit = (_first_token_us(model, scheduler, name, tokens) for name in ("cold", "hit"))
    assert scheduler.num_cached_tokens == PREFIX_TOKENS
    return {
        "decode step, engine, us": us["engine"],
        "decode step, worker, us": us["worker"],
        f"prompt of {PROMPT_TOKENS} tokens, us": cold,
        f"prompt, {PREFIX_TOKENS} tokens shared, us": hit,
    }


def measure_counts(model: Candidate, batch: int) -> dict[str, float]:
    """Return the number of launches and updates in a decode step, and the bytes that requests use
    in the cache.
    """
    launches, cache = model.rank.count_launches(model.config, batch), model.cache
    return {
        "launches of a step": launches.count,
        "updates of a step": launches.num_updates,
        **{
            f"bytes of a request of {name} tokens": cache.blocks_for(tokens) * cache.bytes_per_block
            + cache.bytes_per_slot
            for name, tokens in CONTEXTS.items()
        },
        "bytes copied for a shared prefix": cache.bytes_per_slot,
    }


def _scheduler_with_prefixes(model: Candidate) -> Scheduler:
    config = model.config
    checkpoints = make_checkpoints(config, has_state=bool(model.cache.states))
    pool = BlockPool(NUM_BLOCKS, config.kv.block_size, checkpoints=checkpoints)
    return make_scheduler(config, 0, (), 0, [], pool=pool)


def _first_token_us(model: Candidate, scheduler: Scheduler, name: str, tokens: IntArray) -> float:
    """Return the time from the submission of a request to its first token, on an idle rank."""
    sampling = RowSampling(num_prompt_tokens=len(tokens), seed=0)
    started_s = time.perf_counter()
    scheduler.add(Request(name, tokens, sampling, max_tokens=1, stop_token_ids=[]))
    while scheduler.has_work:
        results: list[StepResult] = []
        if plan := scheduler.schedule():
            with model.rank.npu.launching():
                model.runner.launch(plan.for_rank(0), 0, results.append)
        else:
            results.append(model.runner.finish())
        scheduler.update(results)
    return (time.perf_counter() - started_s) * 1e6


def report(results: dict[str, Any]) -> Report:
    lines, others = [], list(MODELS)[1:]
    for what, values in results["rows"].items():
        base, cells = values["dense"], [f"{values['dense']:,.0f}"]
        for name in others:
            cells += [f"{values[name]:,.0f}", f"{values[name] / base:.2f}" if base else "-"]
        lines.append([what, *cells])
    headings = [cell for name in others for cell in (name, f"{name} / dense")]
    table = Table("Models of equal width", ["", "dense", *headings], lines)
    return Report("A hybrid, a sparse and a dense model", [table])


if __name__ == "__main__":
    run_command(main)
