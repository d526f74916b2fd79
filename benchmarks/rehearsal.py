"""``make bench-rehearsal``: the deployments of ``configs/`` at full shape, without NPUs.

All ranks of a lockstep group run on this machine as in a real deployment, with all layers and
widths of the model. Weights are zeros that use no memory of the host. Each emulated NPU is busy for
as long as the time model predicts for a chip (``docs/develop/device-time.md``). So captures use as
many streams and as much device memory as with real NPUs. All ranks share the cores of this machine,
so host times are much longer than in a real deployment.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.common.command import numbers, report_bench, run_command
from benchmarks.common.engine import DecodeEngine
from benchmarks.common.report import Report, make_table
from benchmarks.common.turns import show_start
from benchmarks.common.workload import decode_workload, run_workload
from dist_aclgraph.actors.deployment.controller_life import OnProgress
from dist_aclgraph.actors.host.processes import host_memory
from dist_aclgraph.config import Config, load_config, parse_overrides
from dist_aclgraph.errors import ConfigError

CONFIGS = Path("configs")
# The SoC names of the emulated NPUs: an A2, and one die of an A3.
A2, A3 = "Ascend910B1", "Ascend910_9391"
DEPLOYMENTS = (
    ("qwen3.5-397b-a17b-tp8-dp2-ep16-mtp", A2),
    ("deepseek-v3.2-tp8-dp4-ep32-w8a8-128k", A2),
    ("glm-5-tp8-dp4-ep32-w8a8", A2),
    ("kimi-k2-tp8-dcp2-dp4-ep32-w8a8", A2),
    ("kimi-k2-tp8-dcp2-dp4-ep32-w8a8", A3),
)
MEMORY_MB = 62_000  # an NPU of 64 GB, without the memory that its driver uses
NUM_WORDS = 256  # number of different token ids in prompts
PHASES = ("place", "join", "load", "negotiate", "capture", "step")
LIMIT_S = 1800.0  # time limit of each phase, which is long because all ranks share a few cores
# The stages in which a rank's host works for a step. The stage "update" is left out: with drafts,
# this stage contains the wait for the previous step.
STAGES = ("rows", "inputs", "upload", "lengths", "replay", "sample")
MODE = "full"  # only these steps are counted

CAPTURED = {
    "deployment": "{name}",
    "chip": "{soc}",
    "ranks": "{ranks}",
    "sizes": "{sizes}",
    "streams": "{streams} of {offered_streams}",
    "predicted": "{predicted_streams}",
    "weights, GiB": "{weights:.1f}",
    "graphs, MiB": "{pool!M:.0f}",
    "tokens in KV": "{tokens:,}",
    "start, s": "{start_s:.0f}",
    "memory here, GiB": "{here:.1f}",
}
STEPS = {
    "deployment": "{name}",
    "chip": "{soc}",
    "requests": "{batch}",
    "device busy, ms": "{busy_ms:.1f}",
    "waits for other ranks, ms": "{collective_ms:.1f}",
    "host, ms": "{host_ms:.1f}",
}


def main(
    which: Annotated[str, typer.Option(help="Numbers of deployments, from 0.")] = "0,1,2,3,4",
    requests: Annotated[int, typer.Option(help="Requests of a data-parallel rank.")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 256,
    steps: Annotated[int, typer.Option(help="Tokens of the first request to end.")] = 24,
    override: Annotated[list[str] | None, typer.Option(help="key=value over the file.")] = None,
    config: Annotated[Path | None, typer.Option(help="Another file, on an A2.")] = None,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
) -> None:
    """Rehearse, print and save."""
    chosen = [(CONFIGS / f"{name}.yaml", soc) for name, soc in DEPLOYMENTS]
    indexes = numbers(which)
    if not set(indexes) <= set(range(len(chosen))):
        raise ConfigError(
            f"--which is {which}; the deployments have the numbers 0 to {len(chosen) - 1}"
        )
    files = [chosen[index] for index in indexes] if config is None else [(config, A2)]
    others = parse_overrides(override or [])

    def measure(folder: Path, bar: Progress) -> dict[str, Any]:
        rows = [_rehearse(path, soc, others, (requests, prompt, steps), bar) for path, soc in files]
        return {"rows": rows, "note": "modelled device, real host; not a figure of an NPU"}

    report_bench("rehearsal", out, measure, report)


def report(results: Mapping[str, Any]) -> Report:
    rows = results["rows"]
    tables = [make_table("Captured", CAPTURED, rows), make_table("A decode step", STEPS, rows)]
    return Report("Deployments at full shape", tables)


class RehearsedEngine(DecodeEngine):
    """A deployment with the configuration from a file, instead of the usual configuration of a
    bench.
    """

    def __init__(self, config: Config, on_progress: OnProgress) -> None:
        self.config, self._on_progress = config, on_progress


def _rehearse(
    path: Path,
    soc: str,
    others: Mapping[str, Any],
    work: tuple[int, int, int],
    bar: Progress,
) -> dict[str, Any]:
    """Run one deployment. Return the deployment's row of the table.

    Args:
        work: three numbers: requests per data-parallel rank, tokens of each prompt, and tokens of
            each output.
    """
    keys = {
        "profile": True,
        "weights": "dummy",
        "device.kind": "emulated",
        "device.soc": soc,
        "device.emulator.kernels": "timed",
        "device.emulator.memory_mb": MEMORY_MB,
        **{f"timeouts.{phase}_s": LIMIT_S for phase in PHASES},
        **others,
    }
    config = load_config(path, keys)
    requests, prompt, steps = work
    batch, available = requests * config.parallel.dp, host_memory()[1]
    started_s = time.monotonic()
    with RehearsedEngine(config, show_start(bar, path.stem)) as engine:
        start_s = time.monotonic() - started_s
        arrivals = decode_workload(batch, prompt, steps, NUM_WORDS)
        run_workload(engine.client, "warm-up", arrivals)
        before = engine.deployment.report()
        run_workload(engine.client, "measured", arrivals)
        after = engine.deployment.report()
        here = available - host_memory()[1]
    times, counted = (_difference(before, after, key) for key in ("timings_us", "counted"))
    count = times[f"{MODE}.steps"]
    rank = after["ranks"][0]
    return {
        "name": path.stem,
        "soc": soc,
        "ranks": config.parallel.world_size,
        "batch": batch,
        "sizes": sum(len(sizes) for sizes in after["plan"]["families"].values()),
        "streams": rank["streams"]["measured"],
        "predicted_streams": rank["streams"]["predicted"],
        "offered_streams": rank["streams"]["offered"],
        "weights": after["weight_bytes"] / (1 << 30),
        "pool": after["pool_bytes"],
        "tokens": _tokens(config, after),
        "busy_ms": counted[f"{MODE}.modelled_busy_ns"] / count / 1e6,
        "collective_ms": counted[f"{MODE}.modelled_idle_collective_ns"] / count / 1e6,
        "host_ms": sum(times.get(f"{MODE}.{stage}", 0) for stage in STAGES) / count / 1e3,
        "start_s": start_s,
        "here": here / (1 << 30),
    }


def _difference(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> dict[str, float]:
    return {name: value - before[key].get(name, 0) for name, value in after[key].items()}


def _tokens(config: Config, report: Mapping[str, Any]) -> int:
    """Return the number of tokens that fit in the caches of all data-parallel ranks together."""
    blocks: int = report["num_blocks"] - 1  # one block is for padding
    return config.parallel.dp * blocks * config.kv.block_size * config.parallel.dcp


if __name__ == "__main__":
    run_command(main)
