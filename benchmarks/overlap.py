"""``make bench-overlap``: what an NPU waits for between steps, with one and with two in flight.

Modelled device, real host: kernels take the time that ``docs/device-time.md`` gives them, weights
do not exist, and the host does all that it does in serving. What is shown is how long a decode step
takes, for how long the device was busy in it, and what it waited for in the rest. Ranks of tensor
parallel deployments share this machine's cores, and are late for that reason, too. Never a figure
of an NPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.command import numbers, report_bench, run_command
from benchmarks.engine import DecodeEngine
from benchmarks.overlap_report import draw, report
from benchmarks.turns import ray_for, show_start

PROMPT_LEN, WARM_UP = 128, 24
MODES = ("FULL_DECODE_ONLY", "PIECEWISE", "NONE")
MEMORY_MB = 1 << 16  # of a device, counted and never committed
ALLOWED_WAIT = 0.02, 60.0  # of a step, or in us, whichever is more
ALLOWED_WAIT_WITH_DRAFTS = 0.05, 60.0
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# A dense DeepSeek decoder with a next-token module, as large as Qwen3-8B.
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 2048,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A shape and how it is served."""

    family: dict[str, Any]
    hidden: int
    layers: int
    heads: int
    ffn: int
    tp: int = 1
    num_drafts: int = 0
    choices: int = 1  # tokens that may be sampled: one draft in so many passes
    gap_us: float | None = None  # between two kernels, in place of the table's

    def write(self, directory: Path) -> Path:
        """Write config.json; return the directory."""
        sizes = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.ffn,
        }
        if self.family is DEEPSEEK:
            sizes |= {"num_key_value_heads": self.heads, "first_k_dense_replace": self.layers}
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(self.family | sizes))
        return directory


MODELS = {
    "Qwen3-0.6B": Model(family=QWEN3, hidden=1024, layers=28, heads=16, ffn=3072),
    "Qwen3-8B": Model(family=QWEN3, hidden=4096, layers=36, heads=32, ffn=12288),
    "Qwen3-32B, TP 4": Model(family=QWEN3, hidden=5120, layers=64, heads=64, ffn=25600, tp=4),
    "DeepSeek, dense, 1 draft": Model(
        family=DEEPSEEK, hidden=4096, layers=36, heads=32, ffn=12288, num_drafts=1
    ),
    "DeepSeek, dense, every second draft passes": Model(
        family=DEEPSEEK, hidden=4096, layers=36, heads=32, ffn=12288, num_drafts=1, choices=2
    ),
    # A device that takes about 2, 4 and 10 ms for a step that costs the host little.
    **{
        f"4 layers, {gap_us} us between kernels": Model(
            family=QWEN3, hidden=512, layers=4, heads=8, ffn=1024, gap_us=gap_us
        )
        for gap_us in (30, 60, 150)
    },
}
# What the device did in a step, by the emulator's counters.
CAUSES = (
    "busy", "idle_host", "idle_update", "idle_external", "idle_event", "idle_copy",
    "idle_collective",
)  # fmt: skip
MODES_OF_STEPS = ("full", "piecewise", "eager")


def main(
    models: Annotated[str, typer.Option(help="Their numbers, from 0.")] = "0,1,2,3,4,5,6,7",
    batches: Annotated[str, typer.Option(help="Requests that decode together.")] = "1,8,32,128",
    modes: Annotated[str, typer.Option(help="Graph modes.")] = ",".join(MODES),
    steps: Annotated[int, typer.Option(help="Decode steps of a request.")] = 64,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
) -> None:
    """Measure, print and save."""
    names, sizes = [list(MODELS)[index] for index in numbers(models)], numbers(batches)
    report_bench(
        "overlap",
        out,
        lambda folder, bar: measure(folder, bar, names, sizes, modes.split(","), steps),
        report,
        draw,
    )


def measure(
    folder: Path,
    bar: Progress,
    names: Sequence[str],
    batches: Sequence[int],
    modes: Sequence[str],
    steps: int,
) -> dict[str, Any]:
    """Run every deployment after the other; return one row for each of its batches."""
    found: list[dict[str, Any]] = []
    engines = {
        (name, mode, in_flight): _engine(folder, bar, name, mode, in_flight, max(batches))
        for name in names
        for mode in modes
        if mode == MODES[0] or not (MODELS[name].num_drafts or MODELS[name].gap_us)
        for in_flight in (1, 2)
    }
    with ray_for(list(engines.values())):
        for (name, mode, in_flight), engine in engines.items():
            with engine:
                for batch in batches:
                    row = {"model": name, "mode": mode, "in_flight": in_flight, "batch": batch}
                    found.append(row | _decode(engine, batch, steps, MODELS[name].num_drafts))
    return {
        "rows": found,
        "steps": steps,
        "repeats": 1,
        "note": "modelled device (A2), real host; not a figure of an NPU",
    }


def _engine(
    folder: Path, bar: Progress, name: str, mode: str, in_flight: int, max_batch: int
) -> DecodeEngine:
    model = MODELS[name]
    directory = model.write(folder / f"{len(list(folder.iterdir()))}")
    emulated: dict[str, Any] = {
        "kernels": "timed",
        "choices": model.choices,
        "memory_mb": MEMORY_MB,
        "strict": False,
    }
    if model.gap_us is not None:
        rates = directory / "rates.json"
        rates.write_text(json.dumps({"gap_us": model.gap_us}))
        emulated["rates"] = str(rates)
    return DecodeEngine(
        directory,
        max_batch,
        on_progress=show_start(bar, f"{name}, {mode}, {in_flight} in flight"),
        weights="dummy",
        dtype="bfloat16",
        parallel={"tp": model.tp},
        graph={"mode": mode},
        speculative={"num_tokens": model.num_drafts},
        device={"emulator": emulated},
        kv={"num_blocks": 1 + max_batch * 8},
        scheduler={
            "max_num_seqs": max_batch,
            "max_num_batched_tokens": 8192,
            "prefix_cache": False,
            "steps_in_flight": in_flight,
        },
    )


def _decode(engine: DecodeEngine, batch: int, steps: int, num_drafts: int) -> dict[str, Any]:
    """Decode once to warm up, then measured; return a step's times in microseconds."""
    cold = engine.deployment.report()
    engine.decode(batch, PROMPT_LEN, WARM_UP, ignore_eos=True)
    before = engine.deployment.report()
    run = engine.decode(batch, PROMPT_LEN, steps, ignore_eos=True)
    after = engine.deployment.report()
    mode = next(m for m in MODES_OF_STEPS if _gained(before, after, m, "steps"))
    num_steps = _gained(before, after, mode, "steps")
    if mode != "eager":
        # What is counted until a step's result is read is of the steps queued behind it, too: the
        # first of these lies among what the prompts' step is said to have done.
        num_steps -= engine.config.scheduler.steps_in_flight - 1
    times = {
        cause: _gained(before, after, mode, f"modelled_{cause}_ns", "counted") / num_steps / 1e3
        for cause in CAUSES
    }
    # Prompts keep the device busy for as long in both runs.
    more_ns = _busy_ns(before, after) - _busy_ns(cold, before)
    more = _gained(before, after, mode, "steps") - _gained(cold, before, mode, "steps")
    times["busy"] = more_ns / more / 1e3
    waits_us = sum(times.values()) - times["busy"]
    share, least_us = ALLOWED_WAIT_WITH_DRAFTS if num_drafts else ALLOWED_WAIT
    allowed_us = max(share * sum(times.values()), least_us)
    return {
        "step_us": run.step_ms * 1e3,
        "waits_us": waits_us,
        "allowed_us": allowed_us,
        **{f"{cause}_us": value for cause, value in times.items()},
    }


def _busy_ns(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Return how long the device was busy between two reports, in steps of all modes."""
    return sum(_gained(before, after, m, "modelled_busy_ns", "counted") for m in MODES_OF_STEPS)


def _gained(
    before: dict[str, Any], after: dict[str, Any], mode: str, what: str, table: str = "timings_us"
) -> float:
    key = f"{mode}.{what}"
    return float(after[table].get(key, 0) - before[table].get(key, 0))


if __name__ == "__main__":
    run_command(main)
