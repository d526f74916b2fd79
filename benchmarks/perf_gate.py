"""``make perf-gate``: compares the device work of a step with the numbers in ``perf_gate.json``.

The gate decodes with eleven combinations of models and settings, in one process on the emulator.
The time model computes the device's times. One combination also computes prompts. The gate counts a
step's launches, updates, uploads, downloads and synchronizations, and reads the step's modelled
time. These numbers do not depend on the speed of the machine. If a number exceeds the number in the
file by more than its tolerance, the gate fails and names the model and the number. ``--write``
writes the numbers to the file, so that a review shows the changes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.common.command import run_command
from benchmarks.common.one_rank import OneRank, has_work
from benchmarks.common.report import Table
from benchmarks.hybrid import EQUAL, HEADS, MODELS
from benchmarks.step import MAX_LEN, WAYS, make_rank, make_scheduler, run_steps
from dist_aclgraph.config import Config
from dist_aclgraph.device import emulator
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.planning.buckets import GraphFamily, kv_sizes

NUMBERS = Path(__file__).with_name("perf_gate.json")
LAYERS, BATCH, WARM_UP, STEPS = 4, 8, 24, 40
# A tolerance is the largest growth that does not count as a failure. Counts need a tolerance: they
# are averages over the steps, and the measurement can miss an event of the first or the last step.
COUNT_TOLERANCE = 0.25  # per step
TIME, TIME_TOLERANCE = "modelled busy us", 0.01  # a fraction of the time
COUNTERS = {
    "updates": "task_updates",
    "synchronizes": "host_syncs",
    "device waits for the host": "external_waits",
}
EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
LATENT = {k: v for k, v in MODELS["sparse"].items() if not k.startswith("index_")}


class Case(NamedTuple):
    """A model, its settings, and how its tokens are sampled.

    Attributes:
        model: the keys of config.json that differ between cases. ``EQUAL`` contains the keys that
            all cases have.
        sampling: name of the sampling parameters in ``benchmarks.step``.
        settings: further keys of the deployment's configuration.
        has_prompts: whether each step also computes prompts, so that the step has ``MIXED_TOKENS``
            tokens and mode FULL.
    """

    model: Mapping[str, Any]
    sampling: str = "greedy"
    settings: Mapping[str, Any] = MappingProxyType({})
    has_prompts: bool = False


INT8 = {"quantization": "w8a8"}
# Prompts of LONG_PROMPT tokens are so long that they fill all steps that are run.
MIXED_TOKENS, LONG_PROMPT = 64, 900
MIXED = GraphFamily(run_mode="FULL", query_len=0, buckets=(MIXED_TOKENS,))
CHUNKS = {
    "scheduler": {
        "max_num_seqs": BATCH,
        "max_num_batched_tokens": MIXED_TOKENS,
        "prefix_cache": False,
    }
}
EXPERT_MODEL = {"architectures": ["Qwen3MoeForCausalLM"], **HEADS, **EXPERTS}
LATENT_MODEL = {**LATENT, "architectures": ["DeepseekV2ForCausalLM"]}
# A rank with 16 heads. The model has the widths of DeepSeek-V3: torch_npu has an operator for these
# widths.
WIDE_LATENT_MODEL = {
    **LATENT_MODEL,
    "hidden_size": 7168,
    "q_lora_rank": 1536,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
CASES = {
    "dense": Case(MODELS["dense"]),
    "dense, no updates": Case(MODELS["dense"], settings={"graph": {"updates": "none"}}),
    "dense, random": Case(MODELS["dense"], "random"),
    "dense, int8": Case(MODELS["dense"], settings=INT8),
    "experts": Case(EXPERT_MODEL),
    "experts, int8": Case(EXPERT_MODEL, settings=INT8),
    "latent": Case(LATENT_MODEL),
    "latent, int8": Case(LATENT_MODEL, settings=INT8),
    "latent of DeepSeek-V3, int8": Case(WIDE_LATENT_MODEL, settings=INT8),
    "hybrid": Case(MODELS["hybrid"]),
    "sparse": Case(MODELS["sparse"]),
    "sparse, int8 KV": Case(MODELS["sparse"], settings={"kv": {"dtype": "int8"}}),
    "sparse, prompts": Case(MODELS["sparse"], settings=CHUNKS, has_prompts=True),
}
Row = dict[str, float]


class HostCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls of torch that cause work on the device: launches, uploads and downloads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = {"launches outside of graphs": 0, "uploads": 0, "downloads": 0}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        inputs, made = tree_leaves((args, kwargs)), tree_leaves(outputs)
        reads, writes = (
            {x.device.type for x in leaves if hasattr(x, "device")} for leaves in (inputs, made)
        )
        if "npu" in reads | writes and has_work(func, inputs, made):
            self.counts[_kind(reads, writes)] += 1
        return outputs


def _kind(reads: set[str], writes: set[str]) -> str:
    if "cpu" in writes:
        return "downloads"
    return "uploads" if "cpu" in reads else "launches outside of graphs"


def main(
    write: Annotated[bool, typer.Option("--write", help="Write the numbers to the file.")] = False,
    only: Annotated[str, typer.Option(help=f"Of {', '.join(CASES)}; all if empty.")] = "",
) -> None:
    """Count, print, and compare with the file."""
    console, names = Console(width=150), [only] if only else list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        found = {name: count_case(Path(folder), CASES[name]) for name in names}
    console.print(table_of(found).for_terminal())
    known: dict[str, Row] = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    if write:
        NUMBERS.write_text(json.dumps({**known, **found}, indent=2) + "\n")
        return
    worse = growths(known, found)
    if worse:
        raise DistAclGraphError("a step got more expensive: " + "; ".join(worse))
    console.print("No number is worse than in the file.")


def count_case(folder: Path, case: Case) -> Row:
    """Return the numbers of a step with ``BATCH`` requests, as averages over ``STEPS`` steps."""
    path = Path(tempfile.mkdtemp(dir=folder))
    shape = {**EQUAL, **case.model, "num_hidden_layers": LAYERS}
    (path / "config.json").write_text(json.dumps(shape))
    graphs = [MIXED.describe(MIXED_TOKENS, BATCH)] if case.has_prompts else []
    rank, runner, config = make_rank(
        path, (BATCH,), kernels="timed", weights="dummy", graphs=graphs, **case.settings
    )
    in_graphs = rank.count_launches(config, BATCH, next(iter(graphs), None)).count
    # Without updates of lengths, a bucket has one graph for each KV length. A step replays one of
    # these graphs.
    num_graphs = len(kv_sizes(config, MAX_LEN)) or 1
    return {"launches in graphs": in_graphs / num_graphs, **count_steps(rank, runner, config, case)}


def count_steps(rank: OneRank, runner: ModelRunner, config: Config, case: Case) -> Row:
    """Run steps. Return the device work of these steps, without the work of captures."""
    steps = WARM_UP + STEPS
    ways = [WAYS[case.sampling]] * BATCH
    mixed = (MIXED, LONG_PROMPT) if case.has_prompts else ()
    scheduler = make_scheduler(config, BATCH, (BATCH,), 2 * steps, ways, None, *mixed)
    for _ in run_steps(rank.npu, runner, scheduler, WARM_UP):
        pass
    rank.npu.synchronize()
    calls, before = HostCalls(), emulator.counters()
    with calls:
        for _ in run_steps(rank.npu, runner, scheduler, STEPS):
            pass
    while runner.is_busy:
        runner.finish()
    rank.npu.synchronize()
    after = emulator.counters()
    totals = {
        **calls.counts,
        **{name: after[key] - before[key] for name, key in COUNTERS.items()},
        TIME: (after["modelled_busy_ns"] - before["modelled_busy_ns"]) / 1e3,
    }
    return {name: round(total / STEPS, 2) for name, total in totals.items()}


def growths(known: Mapping[str, Row], found: Mapping[str, Row]) -> list[str]:
    """Return a phrase for each number that has grown by more than its tolerance, or that is not in
    the file.
    """
    worse = []
    for name, row in found.items():
        for what, value in row.items():
            old = known.get(name, {}).get(what)
            if old is None:
                worse.append(f"{name}: {what} is not in {NUMBERS.name}, run with --write")
            elif value > _limit(what, old):
                worse.append(f"{name}: {what} {value:g}, {old:g} in {NUMBERS.name}")
    return worse


def _limit(what: str, known: float) -> float:
    return known * (1 + TIME_TOLERANCE) if what == TIME else known + COUNT_TOLERANCE


def table_of(found: Mapping[str, Row]) -> Table:
    headings = list(next(iter(found.values())))
    lines = [[name, *(f"{row[what]:g}" for what in headings)] for name, row in found.items()]
    return Table(f"A step of {BATCH} requests, {LAYERS} layers", ["", *headings], lines)


if __name__ == "__main__":
    run_command(main)
