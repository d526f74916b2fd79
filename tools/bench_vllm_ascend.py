"""``make bench-vllm-ascend``: times of streamed tokens over HTTP, compared with vllm-ascend.

Both services run a model without weights on the emulated NPU, with equal settings. They take turns
with equal loads. The emulated device either models the times of kernels
(``docs/develop/device-time.md``), or runs no kernels. The host is real. The figures say nothing
about an NPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import typer
from rich.progress import Progress

from benchmarks.common.checkpoints import Shape, write_checkpoint
from benchmarks.common.command import report_bench, run_command
from benchmarks.common.report import Report, make_table
from benchmarks.common.workload import percentile
from benchmarks.overlap import MEMORY_MB, MODELS
from benchmarks.processes.serve_servers import free_port
from tools.test_vllm_ascend import ROOT, Peer
from tools.vllm_ascend_loads import LOADS, MODEL, Client, Times

MAX_LEN, MAX_BATCH, MAX_TOKENS, BLOCK, NUM_BLOCKS = 8192, 64, 8192, 128, 1100
SIZES = [1, 2, 4, *range(8, MAX_BATCH + 1, 8)]
CANN = "9.1.0"
START_S, POLL_S, EXIT_S, SETTLE_S = 600.0, 0.2, 30.0, 0.3
PERCENTS = 50, 90, 99, 100
PEER, OURS = "vllm-ascend", "dist-aclgraph"
# A pass of vllm-ascend replaces norms and rotary embeddings by a kernel that Triton compiles. The
# emulator has no such kernel.
NO_TRITON = {"ascend_compilation_config": {"fuse_qknorm_rope": False}}


@dataclass(frozen=True)
class Device:
    """What the emulated device does, and the model and the loads that are measured on it.

    Attributes:
        kernels: the emulator's setting.
        config: the model's config.json.
        shape: the shape of the model's weights; None if kernels do not compute.
        loads: names of ``LOADS``.
    """

    kernels: str
    loads: Sequence[str]
    config: dict[str, Any] | None = None
    shape: Shape | None = None

    @property
    def settings(self) -> dict[str, str]:
        """The emulator's settings."""
        return {"kernels": self.kernels, "strict": "0", "hbm_mb": str(MEMORY_MB), "cann": CANN}

    def write_model(self, folder: Path) -> None:
        """Write a checkpoint with the tokenizer of the tiny model."""
        weights = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(ROOT / "models" / "tiny-qwen3", folder, ignore=weights)
        if self.shape is None:
            (folder / "config.json").write_text(json.dumps(self.config))
        else:
            write_checkpoint(self.shape, folder, zeros=["lm_head.weight"])


SMALL = Shape(hidden=512, layers=4, heads=8, kv_heads=2, ffn=1536, max_len=MAX_LEN)
DEVICES = {
    "timed": Device(
        "timed", ("alone", "burst", "join", "long prompts", "mixed"), MODELS["Qwen3-8B"].config
    ),
    "skip": Device("skip", ("alone", "burst", "join", "steady"), SMALL.config()),
    "compute": Device("compute", ("alone", "mixed"), shape=SMALL),
}


def our_config(model: Path, port: int, mode: str, device: Device) -> dict[str, Any]:
    """Return our service's configuration, with the same settings as ``peer_options``."""
    return {
        "model": str(model),
        "served_model_name": MODEL,
        "weights": "dummy" if device.shape is None else "checkpoint",
        "dtype": "bfloat16",
        "max_model_len": MAX_LEN,
        "scheduler": {
            "max_num_seqs": MAX_BATCH,
            "max_num_batched_tokens": MAX_TOKENS,
            "prefix_cache": False,
        },
        "kv": {"num_blocks": NUM_BLOCKS, "block_size": BLOCK},
        "graph": {"mode": mode, "sizes": SIZES},
        "device": {
            "kind": "emulated",
            "emulator": {
                "kernels": device.kernels,
                "strict": False,
                "memory_mb": MEMORY_MB,
                "cann": CANN,
            },
        },
        "serve": {"port": port},
    }


def peer_options(model: Path, port: int, mode: str, device: Device) -> list[str]:
    """Return the options of vLLM's server."""
    graphs = {"cudagraph_mode": mode, "cudagraph_capture_sizes": SIZES}
    values = {
        "model": model,
        "served-model-name": MODEL,
        "load-format": "dummy" if device.shape is None else "auto",
        "dtype": "bfloat16",
        "host": "127.0.0.1",
        "port": port,
        "max-model-len": MAX_LEN,
        "max-num-seqs": MAX_BATCH,
        "max-num-batched-tokens": MAX_TOKENS,
        "block-size": BLOCK,
        "num-gpu-blocks-override": NUM_BLOCKS,
        "compilation-config": json.dumps(graphs),
        "additional-config": json.dumps(NO_TRITON),
    }
    options = [f"--{name}={value}" for name, value in values.items()]
    return [*options, "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]


@contextmanager
def served(command: Sequence[str], url: str, log: Path) -> Iterator[None]:
    """Run a server until the context ends.

    Raises:
        RuntimeError: the server ended, or did not answer in time; the message quotes the end of the
            log.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline_s = time.monotonic() + START_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{url} does not answer:\n{log.read_text()[-3000:]}")
            time.sleep(POLL_S)
        yield
    finally:
        for signal_ in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, signal_)
                process.wait(EXIT_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=START_S).status_code == 200
    except httpx.TransportError:
        return False


def measure(
    folder: Path, bar: Progress, peer: Peer, device: Device, rounds: int, mode: str
) -> dict[str, Any]:
    """Run both services in turns, with all loads; return a row for each load and service."""
    device.write_model(folder / "model")
    ports = {PEER: free_port(), OURS: free_port()}
    config = folder / "ours.yaml"
    config.write_text(json.dumps(our_config(folder / "model", ports[OURS], mode, device)))
    module = ["-m", "vllm.entrypoints.openai.api_server"]
    options = peer_options(folder / "model", ports[PEER], mode, device)
    commands = {
        PEER: (peer.command([*module, *options], device.settings), "health"),
        OURS: ([sys.executable, "-m", "dist_aclgraph.cli.main", "serve", str(config)], "ready"),
    }
    found: dict[tuple[str, str], list[Times]] = {
        (load, name): [] for load in device.loads for name in ports
    }
    with ExitStack() as stack:
        start = bar.add_task("", total=len(ports))
        for name, (command, path) in commands.items():
            bar.update(start, description=f"Starting {name}")
            url = f"http://127.0.0.1:{ports[name]}/{path}"
            stack.enter_context(served(command, url, folder / f"{name}.log"))
            bar.advance(start)
        task = bar.add_task("", total=(rounds + 1) * len(found))
        for round_ in range(rounds + 1):
            for (load, name), turns in found.items():
                bar.update(task, description=f"{load}, {name}")
                times = LOADS[load](Client(ports[name], seed=round_))
                if round_:  # the first round warms up
                    turns.append(times)
                time.sleep(SETTLE_S)
                bar.advance(task)
    return {
        "rows": [
            {"load": load, "name": name, **summary(turns)} for (load, name), turns in found.items()
        ],
        "rounds": rounds,
        "mode": mode,
        "note": f"graph mode {mode}, kernels {device.kernels}, real host; not a figure of an NPU",
    }


def summary(turns: Sequence[Times]) -> dict[str, Any]:
    """Return each percentile of each kind of times, as the median over the turns; None if the load
    does not measure this kind of times.
    """
    row: dict[str, Any] = {}
    for what in ("first", "gap", "total"):
        measured = [turn[what] for turn in turns if what in turn]
        for percent in PERCENTS:
            found = [percentile(values, percent) for values in measured]
            row[f"{what}_{percent}"] = statistics.median(found) if found else None
    return row


def report(results: dict[str, Any]) -> Report:
    columns = {
        "load, service": "{load}, {name}",
        "first token p50, ms": "{first_50:.1f}",
        "p90": "{first_90:.1f}",
        "p99": "{first_99:.1f}",
        "gap p50, ms": "{gap_50:.1f}",
        "p99 ": "{gap_99:.1f}",
        "longest": "{gap_100:.1f}",
        "whole load, ms": "{total_50:.0f}",
    }
    table = make_table("Streams over HTTP", columns, results["rows"])
    return Report("Streamed tokens over HTTP, beside vllm-ascend", [table])


def main(
    checkout: Annotated[Path, typer.Argument(help="A work tree of vllm-ascend.")],
    environment: Annotated[Path, typer.Argument(help="The virtual environment of vLLM.")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 3,
    kernels: Annotated[
        Literal["timed", "skip", "compute"], typer.Option(help="What the emulated device does.")
    ] = "timed",
    mode: Annotated[str, typer.Option(help="Graph mode of both services.")] = "FULL_DECODE_ONLY",
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
) -> None:
    """Measure, print and save."""
    peer = Peer(checkout.absolute(), environment.absolute())
    peer.prepare()
    report_bench(
        "vllm-ascend",
        out,
        lambda folder, bar: measure(folder, bar, peer, DEVICES[kernels], rounds, mode),
        report,
    )


if __name__ == "__main__":
    run_command(main)
