"""``make bench-load``: compares the time to load a checkpoint with the time to read its bytes once.

The ranks of one tensor parallel group on one node load a checkpoint with random weights, from the
disk and from the page cache. The bench measures how long the deployment is in the state LOADING.
The bench also lets one process read the files from beginning to end, and measures the time. This
time is the first lower bound for the time of loading.

An emulated device uses memory of this machine, and the operating system must first provide this
memory. So there is a second lower bound: the time of the same read, while one other process per
rank fills new memory. All these processes together fill as many bytes as the files have. They use
small memory pages, like emulated devices.

The host of a virtual machine can reclaim freed memory within seconds. Then the next process that
accesses this memory has to wait. A deployment begins to load about ``PAUSE_S`` after its start, so
the bench delays its reads by the same time.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console

from benchmarks.common.checkpoints import Shape, write_checkpoint
from benchmarks.common.command import run_command
from benchmarks.common.report import Table
from benchmarks.start import start_once
from dist_aclgraph.config import make_config
from dist_aclgraph.planning.memory import GIB

CHUNK_BYTES = 16 << 20
PAUSE_S = 20.0  # seconds from the start of the ranks to the state LOADING on this machine
HIDDEN, FFN, VOCAB = 2048, 8192, 8192
ELEMENT_BYTES = 2


def make_shape(num_bytes: float) -> Shape:
    """Return a decoder whose weights have about ``num_bytes`` bytes in bfloat16."""
    shape = Shape(hidden=HIDDEN, layers=1, heads=32, kv_heads=8, ffn=FFN, vocab=VOCAB, head_dim=64)
    layer = 3 * HIDDEN * FFN + 2 * HIDDEN * (shape.heads + shape.kv_heads) * shape.head_dim
    rest = 2 * VOCAB * HIDDEN
    layers = max(1, round((num_bytes / ELEMENT_BYTES - rest) / layer))
    return replace(shape, layers=layers)


def forget(files: list[Path]) -> None:
    """Drop the files from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_once(files: list[Path]) -> float:
    """Return how many seconds one process takes to read all bytes of the files."""
    began_s, buffer = time.monotonic(), bytearray(CHUNK_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.monotonic() - began_s


def read_and_fill(files: list[Path], num_processes: int) -> float:
    """Return how many seconds ``read_once`` takes while other processes fill new memory. The
    processes together fill the number of bytes that the files have.
    """
    share = sum(file.stat().st_size for file in files) // num_processes
    forks = multiprocessing.get_context("fork")
    began_s = time.monotonic()
    filling = [forks.Process(target=_fill, args=(share,)) for _ in range(num_processes)]
    for process in filling:
        process.start()
    read_once(files)
    for process in filling:
        process.join()
    return time.monotonic() - began_s


def _fill(num_bytes: int) -> None:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    np.frombuffer(memory, np.uint8).fill(0xFF)


def later(work: Callable[[], float]) -> float:
    time.sleep(PAUSE_S)
    return work()


def main(
    gib: Annotated[float, typer.Option(help="size of the checkpoint")] = 4.0,
    tp: Annotated[int, typer.Option(help="ranks that load it")] = 4,
    repeats: Annotated[int, typer.Option(help="rounds")] = 3,
) -> None:
    """Write a checkpoint. Load it and read it alternately, and print the ratios of the times."""
    console = Console(width=150)
    with tempfile.TemporaryDirectory() as folder, console.status("") as status:
        status.update(f"Writing {gib:g} GiB of random weights")
        model = write_checkpoint(make_shape(gib * GIB), Path(folder) / "model", torch.bfloat16)
        os.sync()  # the page cache can drop data only after it was written to the disk
        files = sorted(model.glob("*.safetensors"))
        config = make_config(
            {
                "model": str(model),
                "dtype": "bfloat16",
                "parallel": {"tp": tp},
                "graph": {"mode": "NONE"},
                "scheduler": {"max_num_seqs": 1, "max_num_batched_tokens": 64},
                "kv": {"num_blocks": 8},
                "max_model_len": 256,
                "device": {"emulator": {"strict": False}},
            }
        )
        works: tuple[Callable[[], float], ...] = (
            lambda: later(lambda: read_once(files)),
            lambda: later(lambda: read_and_fill(files, tp)),
            lambda: start_once(config)["LOADING"],
        )
        times: dict[str, list[list[float]]] = {"disk": [], "page cache": []}
        for index in range(repeats):
            for source, rounds in times.items():
                status.update(f"Round {index + 1} of {repeats}: from the {source}")
                rounds.append([])
                for work in works:
                    if source == "disk":
                        forget(files)
                    rounds[-1].append(work())
        size = sum(file.stat().st_size for file in files) / GIB
    lines = [
        [
            source,
            *(f"{statistics.median(column):.2f}" for column in zip(*rounds, strict=True)),
            f"{statistics.median(load / read for read, _, load in rounds):.2f}",
            f"{statistics.median(load / floor for _, floor, load in rounds):.2f}",
        ]
        for source, rounds in times.items()
    ]
    title = f"{size:.2f} GiB in bfloat16, TP {tp}, {os.cpu_count()} cores, medians of {repeats}"
    columns = ("from the", "reading once, s", "and filling, s", "LOADING, s", "loading / reading",
               "loading / both")  # fmt: skip
    console.print(Table(f"{title}. Not an NPU figure.", columns, lines).for_terminal())


if __name__ == "__main__":
    run_command(main)
