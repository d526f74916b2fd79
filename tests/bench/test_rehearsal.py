"""``make bench-rehearsal`` runs the deployment of a file, and reports the captured graphs.

The test does not check times.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.runs import run_bench

pytestmark = pytest.mark.bench  # a deployment starts
CONFIG = "configs/tiny-deepseek-v32.yaml"


def test_a_deployment_is_rehearsed_without_weights(tmp_path: Path) -> None:
    size = ["--config", CONFIG, "--requests", "2", "--prompt", "16", "--steps", "12"]
    memory = ["--override", "device.emulator.memory_mb=4096"]

    bench = run_bench("rehearsal", [*size, *memory], tmp_path)

    assert "not a figure of an NPU" in bench.output
    (row,) = bench.results["rows"]
    assert (row["ranks"], row["batch"], row["sizes"]) == (4, 4, 6)
    assert 0 < row["streams"] < row["offered_streams"]
    assert row["tokens"] > 0 and row["pool"] > 0
    assert row["busy_ms"] > 0 and row["host_ms"] > 0
