"""Runs, with small sizes, each bench that no other test runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.runs import ROOT

pytestmark = pytest.mark.slow

SIZES = {
    "arrivals": "--models 0 --repeats 1",
    "kv": "--lengths 512 --layers 2 --batch 2 --steps 9 --rounds 1 --streams 3 --stream-tokens 300 "
    "--roles-rounds 1 --roles-prompts 1",
    "messages": "--workers 1,2 --plan-bytes 512 --steps 5 --repeats 1",
    "overlap": "--models 0 --batches 1 --modes FULL_DECODE_ONLY --steps 32",
    "scale": "--shapes 8x1 --steps 5",
    "serve": "--streams 1 --steps 40 --repeats 1 --no-on-ray --ingresses 1 --of-ingress 2",
    "step": "--layers 2 --batches 2 --steps 8 --sampling greedy,bias",
    "structured": "--constrained 0,1 --steps 80",
}


@pytest.mark.parametrize("name", SIZES)
def test_a_bench_runs_with_a_small_size(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", *SIZES[name].split()]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / f"{name}.json").exists()
