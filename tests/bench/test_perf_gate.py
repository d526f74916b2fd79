"""The performance gate passes on the present code, and finds each planted slowdown."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.bench.runs import ROOT

pytestmark = pytest.mark.bench


def run_module(name: str) -> str:
    command = [sys.executable, "-m", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_this_code_passes() -> None:
    assert "No number is worse" in run_module("benchmarks.perf_gate")


def test_each_planted_slowdown_is_found() -> None:
    output = run_module("tests.bench.planted_slowdowns")
    found = [line for line in output.splitlines() if "in perf_gate.json" in line]

    assert len(found) == 10, output
    assert "not found" not in output
