"""``make bench-overlap``: the idle time of an NPU between steps, with one step in flight and with
two.

The device's times are computed by a model (``docs/develop/device-time.md``). The host does all work
that serving requires. There are no weights. For a decode step, the bench shows the total time, the
time for which the device is busy, and why the device waits. If a deployment has several ranks, the
ranks share the cores of this machine, so each rank is slower. The results are no measurements of an
NPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.common.checkpoints import Shape
from benchmarks.common.command import numbers, report_bench, run_command
from benchmarks.common.engine import DecodeEngine
from benchmarks.common.turns import ray_for, show_start
from benchmarks.reports.overlap_report import draw, report
from dist_aclgraph.files.shipped import shipped

PROMPT_LEN, WARM_UP = 128, 24
NO_UPDATES = "FULL_DECODE_ONLY without updates"
# The settings of graphs for each way to decode.
MODES = {
    "FULL_DECODE_ONLY": {"mode": "FULL_DECODE_ONLY"},
    NO_UPDATES: {"mode": "FULL_DECODE_ONLY", "updates": "none"},
    "PIECEWISE": {"mode": "PIECEWISE"},
    "NONE": {"mode": "NONE"},
}
MAX_LEN = 40960
MEMORY_MB = 1 << 16  # memory of an emulated device; it is counted, but the bench never touches it
# How long the device may wait in a step: this fraction of the step's time, or this number of
# microseconds, whichever is more.
ALLOWED_WAIT = 0.02, 60.0
ALLOWED_WAIT_WITH_DRAFTS = 0.05, 60.0


def qwen3(hidden: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    """Return config.json of a Qwen3 decoder with the published vocabulary."""
    shape = Shape(hidden=hidden, layers=layers, heads=heads, kv_heads=8, ffn=ffn,
                  vocab=151936, head_dim=128, max_len=MAX_LEN)  # fmt: skip
    return {**shape.config(), "torch_dtype": "bfloat16"}


def dense_deepseek() -> dict[str, Any]:
    """Return config.json of a dense DeepSeek decoder with a next-token module.

    The decoder is as large as Qwen3-8B.
    """
    published = json.loads((shipped("configs/shapes") / "deepseek-v3" / "config.json").read_text())
    attention = {"num_attention_heads": 32, "num_key_value_heads": 32}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    layers = {"num_hidden_layers": 36, "first_k_dense_replace": 36}
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": MAX_LEN}
    return {**published, **attention, **experts, **layers, **sizes, "rope_scaling": None}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, and the settings with which the bench serves the model.

    Attributes:
        config: the model's config.json.
        choices: number of different tokens that can be sampled. A draft is accepted with
            probability 1 / ``choices``.
        gap_us: microseconds between two kernels. It replaces the value in the table of the device's
            rates.
    """

    config: dict[str, Any]
    tp: int = 1
    num_drafts: int = 0
    choices: int = 1
    gap_us: float | None = None


MODELS = {
    "Qwen3-0.6B": Model(config=qwen3(1024, 28, 16, 3072)),
    "Qwen3-8B": Model(config=qwen3(4096, 36, 32, 12288)),
    "Qwen3-32B, TP 4": Model(config=qwen3(5120, 64, 64, 25600), tp=4),
    "DeepSeek, dense, 1 draft": Model(config=dense_deepseek(), num_drafts=1),
    "DeepSeek, dense, every second draft passes": Model(
        config=dense_deepseek(), num_drafts=1, choices=2
    ),
    # With these gaps between kernels, the device needs about 2, 4 and 10 ms for a step, although
    # the host has little work.
    **{
        f"4 layers, {gap_us} us between kernels": Model(
            config=qwen3(512, 4, 8, 1024), gap_us=gap_us
        )
        for gap_us in (30, 60, 150)
    },
}
# The parts of the device's time in a step: it is busy, or it waits for one of several reasons. The
# emulator's counters have the same names.
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
    """Run the deployments one after the other. Return one row for each deployment and each batch
    size.
    """
    found: list[dict[str, Any]] = []
    engines = {
        (name, mode, in_flight): modelled_engine(
            folder,
            bar,
            f"{name}, {mode}, {in_flight} in flight",
            MODELS[name],
            MODES[mode],
            max(batches),
            steps_in_flight=in_flight,
        )
        for name in names
        for mode in modes
        if mode == "FULL_DECODE_ONLY" or not (MODELS[name].num_drafts or MODELS[name].gap_us)
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


def modelled_engine(
    folder: Path,
    bar: Progress,
    title: str,
    model: Model,
    graph: dict[str, Any],
    max_batch: int,
    sections: Mapping[str, Any] | None = None,
    **scheduler: Any,
) -> DecodeEngine:
    """Return a deployment without weights. The time model computes the times of its devices.

    Args:
        title: name of the deployment in the progress bar.
        graph: the configuration's keys in the section ``graph``.
        sections: sections of the configuration. Each replaces the bench's section of the same name.
        scheduler: the configuration's keys in the section ``scheduler``.
    """
    directory = folder / f"{len(list(folder.iterdir()))}"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(model.config))
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
        on_progress=show_start(bar, title),
        scheduler=scheduler,
        **{
            "weights": "dummy",
            "dtype": "bfloat16",
            "parallel": {"tp": model.tp},
            "graph": graph,
            "speculative": {"num_tokens": model.num_drafts},
            "device": {"emulator": emulated},
            "kv": {"num_blocks": 1 + max_batch * 8},
            **(sections or {}),
        },
    )


def _decode(engine: DecodeEngine, batch: int, steps: int, num_drafts: int) -> dict[str, Any]:
    """Decode once to warm up, and again to measure. Return a step's times in microseconds."""
    cold = engine.deployment.report()
    engine.decode(batch, PROMPT_LEN, WARM_UP)
    before = engine.deployment.report()
    run = engine.decode(batch, PROMPT_LEN, steps)
    after = engine.deployment.report()
    mode = next(m for m in MODES_OF_STEPS if _gained(before, after, m, "steps"))
    num_steps = _gained(before, after, mode, "steps")
    if mode != "eager":
        # With two steps in flight, the first decode step is queued before the result of the
        # prompts' step arrives. The counters add the work of this decode step to the prompts' step.
        num_steps -= engine.config.scheduler.steps_in_flight - 1
    times = {
        cause: _gained(before, after, mode, f"modelled_{cause}_ns", "counted") / num_steps / 1e3
        for cause in CAUSES
    }
    # Both runs have the same prompts, so the difference of the busy times is from decode steps
    # only.
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
    """Return for how many nanoseconds the device was busy between two reports, summed over the
    steps of all modes.
    """
    return sum(_gained(before, after, m, "modelled_busy_ns", "counted") for m in MODES_OF_STEPS)


def _gained(
    before: dict[str, Any], after: dict[str, Any], mode: str, what: str, table: str = "timings_us"
) -> float:
    key = f"{mode}.{what}"
    return float(after[table].get(key, 0) - before[table].get(key, 0))


if __name__ == "__main__":
    run_command(main)
