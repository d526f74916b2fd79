"""Runs benches of several deployments, and checks the output that every bench must have."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
WARNING = "emulated NPU on the CPU; not an NPU figure"


class Bench(NamedTuple):
    results: dict[str, Any]
    figure: Path
    output: str


def run_bench(name: str, size: Sequence[str], out: Path) -> Bench:
    """Run a bench in a separate process, because a process cannot change the emulator or Ray."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *size, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Bench(json.loads((out / f"{name}.json").read_text()), out / f"{name}.png", done.stdout)


def rows(deployments: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (name, workload, row)
        for name, found in deployments.items()
        for workload, row in found["workloads"].items()
    ]


def assert_says_what_ran_it(bench: Bench) -> None:
    assert bench.results["emulated"]
    assert bench.results["note"].startswith(WARNING)
    assert bench.results["device"] in bench.results["note"]
    assert WARNING in bench.output
    assert bench.figure.read_bytes().startswith(b"\x89PNG")
