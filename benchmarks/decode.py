"""``make bench-decode``: the speed of decoding with the whole engine. Each ratio compares two times
of the same run.

The bench answers four questions. How fast is decoding with graphs, compared with transformers'
``generate`` on the same checkpoint with one thread? How much host time does a step take? Here, the
emulator's kernels do nothing, so only the host limits the speed. How much do updates of attention
lengths cost? The host sends these updates either before or after the replay of the step. How much
does sampling cost? The results are from the emulator; they are not measurements of an NPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from benchmarks.common.checkpoints import Shape, write_checkpoint
from benchmarks.common.command import report_bench, run_command
from benchmarks.common.engine import DecodeEngine
from benchmarks.common.report import Report, Table, make_table
from benchmarks.common.workload import Run
from benchmarks.sampling import sampling_cost, sampling_table
from dist_aclgraph.device import emulator
from dist_aclgraph.extras import require

BATCHES = (1, 8, 32)
PROMPT_LEN = 128
RATIO_SHAPE = Shape(hidden=256, layers=8, heads=4, kv_heads=2, ffn=768)
HOST_SHAPES = tuple(
    Shape(hidden=512, layers=layers, heads=8, kv_heads=2, ffn=1024) for layers in (4, 28)
)
RATIO_GOALS = {1: 2.3, 8: 1.7, 32: 1.1}
UPDATE_GOALS = {"us_per_layer": 60, "wait_share": 0.05}
HOST_GOALS_MS = {4: {1: 0.56, 8: 0.64, 32: 0.7}, 28: {1: 1.1, 8: 1.2, 32: 1.3}}

NOTE = "emulated NPU on the CPU; not an NPU figure"
AGAINST_TRANSFORMERS = {
    "batch": "{batch}",
    "step ms": "{step_ms:.2f}",
    "tokens/s": "{tokens_per_s:.0f}",
    "transformers": "{transformers_tokens_per_s:.0f}",
    "ratio": "{ratio:.2f}",
    "goal": "{goal:.1f}",
}
UPDATES = {
    "layers": "{layers}",
    "kernels": "{kernels}",
    "batch": "{batch}",
    "host us a layer": "{ahead[us_per_layer]:.0f} / {behind[us_per_layer]:.0f}",
    "device waits, share of a step": "{ahead[wait_share]:.1%} / {behind[wait_share]:.1%}",
    "step ms": "{ahead[step_ms]:.2f} / {behind[step_ms]:.2f}",
    "ratio": "{ratio:.2f}",
}


def main(
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
    steps: Annotated[int, typer.Option(help="Tokens per request and repeat.")] = 100,
    repeats: Annotated[int, typer.Option(help="Interleaved repeats; medians count.")] = 3,
) -> None:
    """Measure, print and save."""
    require("transformers", "bench", "comparing with transformers")
    report_bench("decode", out, lambda folder, bar: measure(folder, bar, steps, repeats), report)


def measure(folder: Path, bar: Progress, steps: int, repeats: int) -> dict[str, Any]:
    emulator.load({})  # transformers imports torch_npu, which must find its libraries
    torch.set_num_threads(1)
    task = bar.add_task("Against transformers", total=2 + 3 * len(HOST_SHAPES))
    ratios = against_transformers(folder, steps, repeats)
    hosts, updates = {}, []
    for shape in HOST_SHAPES:
        bar.update(task, advance=1, description=f"Host time, {shape.layers} layers")
        hosts[shape.layers] = host_time(shape, folder, steps, repeats)
    for shape in HOST_SHAPES:
        for kernels in ("skip", "compute"):
            words = f"Updates, {shape.layers} layers, kernels {kernels}"
            bar.update(task, advance=1, description=words)
            updates += update_cost(shape, kernels, folder, steps, repeats)
    bar.update(task, advance=1, description="Sampling")
    return {
        "note": NOTE,
        "device": NOTE,
        "steps": steps,
        "repeats": repeats,
        "against_transformers": ratios,
        "host_time": hosts,
        "updates": updates,
        "sampling": sampling_cost(folder, steps, repeats),
    }


def against_transformers(folder: Path, steps: int, repeats: int) -> list[dict[str, Any]]:
    """Decode alternately with the engine and transformers. Return one record per batch size."""
    path = write_checkpoint(RATIO_SHAPE, folder / RATIO_SHAPE.name, torch.float32)
    generate = _transformers_step_ms(path)
    rows = []
    device = {"emulator": {"strict": False}}
    with DecodeEngine(path, max(BATCHES), dtype="float32", device=device) as engine:
        for batch in BATCHES:
            engine.decode(batch, PROMPT_LEN, 8)  # warm-up
            ours, theirs = [], []
            for _ in range(repeats):
                ours.append(engine.decode(batch, PROMPT_LEN, steps).step_ms)
                theirs.append(generate(batch, max(8, steps // 4)))
            step_ms, reference_ms = statistics.median(ours), statistics.median(theirs)
            rows.append(
                {
                    "batch": batch,
                    "step_ms": step_ms,
                    "tokens_per_s": batch / step_ms * 1e3,
                    "transformers_step_ms": reference_ms,
                    "transformers_tokens_per_s": batch / reference_ms * 1e3,
                    "ratio": reference_ms / step_ms,
                    "goal": RATIO_GOALS[batch],
                }
            )
    return rows


def host_time(shape: Shape, folder: Path, steps: int, repeats: int) -> list[dict[str, Any]]:
    """Measure the host time of a step with kernels that do nothing. Return one record per batch
    size.
    """
    path = write_checkpoint(shape, folder / shape.name, torch.bfloat16)
    rows = []
    device = {"emulator": {"kernels": "skip"}}
    with DecodeEngine(path, max(BATCHES), dtype="bfloat16", device=device) as engine:
        for batch in BATCHES:
            engine.decode(batch, PROMPT_LEN, 8)  # warm-up
            runs = [engine.decode(batch, PROMPT_LEN, steps) for _ in range(repeats)]
            best: Run = sorted(runs, key=lambda run: run.step_ms)[len(runs) // 2]
            rows.append(
                {
                    "batch": batch,
                    "step_ms": best.step_ms,
                    "goal_ms": HOST_GOALS_MS[shape.layers][batch],
                    "update_us_per_layer": best.stages_us["update_per_layer"],
                    "stages_us": best.stages_us,
                }
            )
    return rows


def update_cost(
    shape: Shape, kernels: str, folder: Path, steps: int, repeats: int
) -> list[dict[str, Any]]:
    """Decode alternately in two ways: the host sends the lengths before the replay, or after it.

    Return one record per batch size.
    """
    dtype = {"skip": "bfloat16", "compute": "float32"}[kernels]
    path = write_checkpoint(shape, folder / f"{shape.name}-{dtype}", getattr(torch, dtype))
    common: dict[str, Any] = {
        "dtype": dtype,
        "device": {"emulator": {"kernels": kernels, "strict": False}},
    }
    rows = []
    with ExitStack() as stack:
        engines = {
            way: stack.enter_context(
                DecodeEngine(
                    path,
                    max(BATCHES),
                    graph={"send_ahead": way == "ahead", "sizes": BATCHES},
                    **common,
                )
            )
            for way in ("ahead", "behind")
        }
        for batch in BATCHES:
            for engine in engines.values():
                engine.decode(batch, PROMPT_LEN, 8)  # warm-up
            runs: dict[str, list[Run]] = {way: [] for way in engines}
            for _ in range(repeats):
                for way, engine in engines.items():
                    runs[way].append(engine.decode(batch, PROMPT_LEN, steps))
            row: dict[str, Any] = {"layers": shape.layers, "kernels": kernels, "batch": batch}
            for way, decodes in runs.items():
                row[way] = {
                    "step_ms": statistics.median(run.step_ms for run in decodes),
                    "us_per_layer": _median_stage(decodes, "update_per_layer"),
                    "wait_share": _median_stage(decodes, "update_wait")
                    / statistics.median(run.step_ms * 1e3 for run in decodes),
                }
            rows.append(row)
    return rows


def _median_stage(runs: list[Run], stage: str) -> float:
    return statistics.median(run.stages_us[stage] for run in runs)


def _transformers_step_ms(path: Path) -> Callable[[int, int], float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def run(batch: int, new_tokens: int) -> float:
        """Return the mean time of a decode step.

        It is computed from the difference of two runs with different numbers of steps, so the time
        of the prefill has no effect.
        """
        prompts = torch.randint(0, 1000, (batch, PROMPT_LEN))
        times = []
        for count in (1, 1 + new_tokens):
            start_s = time.perf_counter()
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            times.append(time.perf_counter() - start_s)
        return (times[1] - times[0]) / new_tokens * 1e3

    return run


def report(results: dict[str, Any]) -> Report:
    goals = f"goals: {UPDATE_GOALS['us_per_layer']} us, {UPDATE_GOALS['wait_share']:.0%}"
    updates = [
        {**row, "ratio": row["behind"]["step_ms"] / row["ahead"]["step_ms"]}
        for row in results["updates"]
    ]
    return Report(
        f"{results['repeats']} rounds of {results['steps']} tokens a request",
        [
            make_table(
                "Replayed decode against transformers' generate, float32, one thread",
                AGAINST_TRANSFORMERS,
                results["against_transformers"],
            ),
            *(_host_table(layers, rows) for layers, rows in results["host_time"].items()),
            make_table(
                f"Updates of attention lengths, ahead / only behind ({goals})", UPDATES, updates
            ),
            sampling_table(results["sampling"]),
        ],
    )


def _host_table(layers: int, rows: list[dict[str, Any]]) -> Table:
    stages = [stage for stage in rows[0]["stages_us"] if not stage.startswith("update_")]
    columns = {
        "batch": "{batch}",
        "step ms": "{step_ms:.2f}",
        "goal ms": "{goal_ms:.1f}",
        **{stage: f"{{stages_us[{stage}]:.0f}}" for stage in stages},
        "ahead": "{stages_us[update_ahead]:.0f}",
        "a layer": "{update_us_per_layer:.0f}",
    }
    none = dict.fromkeys((*stages, "update_ahead"), 0.0)
    title = f"Host time of a step, {layers} layers, bfloat16, kernels skipped (us)"
    return make_table(
        title, columns, [{**row, "stages_us": none | row["stages_us"]} for row in rows]
    )


if __name__ == "__main__":
    run_command(main)
