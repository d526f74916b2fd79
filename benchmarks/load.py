"""``make bench-load``: what loading a checkpoint costs over reading its bytes once.

A checkpoint with random weights is loaded by the ranks of one tensor parallel group on one node,
from the disk and from the page cache, each beside one process that only reads the files from
beginning to end. What is measured is the state LOADING of a deployment, as its controller shows it.

The memory of an emulated device is memory of this machine, which has to be given by its system
before: so a second floor is the same reading beside as many processes as there are ranks, each of
which fills its share of so many bytes that nobody has used, in the small pages that devices have.

A virtual machine may lose to its host, within seconds, what it has freed, and whoever touches it
next waits. A deployment loads about ``PAUSE_S`` after its start, so readings begin as late.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console

from benchmarks.checkpoints import Shape, write_checkpoint
from benchmarks.command import run_command
from benchmarks.tables import filled_table
from dist_aclgraph.actors import deployment
from dist_aclgraph.actors.controller import Progress
from dist_aclgraph.config import Config, make_config
from dist_aclgraph.planning.memory import GIB

CHUNK_BYTES = 16 << 20
PAUSE_S = 20.0  # which ranks take here from their start to LOADING
HIDDEN, FFN, VOCAB = 2048, 8192, 8192
ELEMENT_BYTES = 2


@dataclass
class LoadingTime:
    """Called with a deployment's progress; knows how long it was LOADING."""

    began_s: float = 0.0
    ended_s: float = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.state == "LOADING" and not self.began_s:
            self.began_s = time.monotonic()
        elif progress.state not in ("PLACING", "JOINING", "LOADING") and not self.ended_s:
            self.ended_s = time.monotonic()

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


def make_shape(num_bytes: float) -> Shape:
    """Return a decoder whose weights take about ``num_bytes`` in bfloat16."""
    shape = Shape(hidden=HIDDEN, layers=1, heads=32, kv_heads=8, ffn=FFN, vocab=VOCAB, head_dim=64)
    layer = 3 * HIDDEN * FFN + 2 * HIDDEN * (shape.heads + shape.kv_heads) * shape.head_dim
    rest = 2 * VOCAB * HIDDEN
    layers = max(1, round((num_bytes / ELEMENT_BYTES - rest) / layer))
    return Shape(
        hidden=HIDDEN, layers=layers, heads=32, kv_heads=8, ffn=FFN, vocab=VOCAB, head_dim=64
    )


def forget(files: list[Path]) -> None:
    """Drop the files from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_once(files: list[Path]) -> float:
    """Return the seconds that one process takes to read all bytes."""
    began_s, buffer = time.monotonic(), bytearray(CHUNK_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.monotonic() - began_s


def read_and_fill(files: list[Path], num_processes: int) -> float:
    """Return the seconds of ``read_once`` beside processes that fill as many bytes in all."""
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
    """Return what ``work`` returns, as late as a deployment would have begun to load."""
    time.sleep(PAUSE_S)
    return work()


def load_once(config: Config) -> float:
    """Return the seconds that a deployment is LOADING."""
    loading = LoadingTime()
    deployment.start(config, loading).shut_down()
    return loading.seconds


def main(
    gib: Annotated[float, typer.Option(help="size of the checkpoint")] = 4.0,
    tp: Annotated[int, typer.Option(help="ranks that load it")] = 4,
    repeats: Annotated[int, typer.Option(help="rounds")] = 3,
) -> None:
    """Write the checkpoint, load it by turns with reading it, and print the ratios."""
    console = Console(width=150)
    with tempfile.TemporaryDirectory() as folder, console.status("") as status:
        status.update(f"Writing {gib:g} GiB of random weights")
        model = write_checkpoint(make_shape(gib * GIB), Path(folder) / "model", torch.bfloat16)
        os.sync()  # what is not on the disk yet cannot be dropped from the page cache
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
            lambda: load_once(config),
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
    console.print(filled_table(f"{title}. Not an NPU figure.", columns, lines))


if __name__ == "__main__":
    run_command(main)
