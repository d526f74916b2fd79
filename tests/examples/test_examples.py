"""The scripts in examples/ run with the commands that their docstrings name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.conftest import service, shared_service  # noqa: F401

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    assert len(text.splitlines()) <= 40
    assert f"python examples/{path.name}" in text


def test_graphs_are_planned_without_a_device() -> None:
    assert "full decode: 1, 2, 4" in run("plan", "configs/tiny-qwen3.yaml", "graph.sizes=[1,2,4]")


def test_the_formulas_allow_the_published_number_of_buckets() -> None:
    # A bucket has 49 graphs, and each graph needs 3 streams. There are 1800 streams, and tensor
    # parallelism uses 40 of them. So (1800 - 40) / (49 * 3) = 11.97 buckets fit.
    assert run("budget", "48", "8").startswith("v0.11: 11 buckets")


def test_a_load_is_simulated() -> None:
    assert "full decode" in run("simulate")


@pytest.mark.slow
@pytest.mark.cluster
def test_prompts_are_answered() -> None:
    assert "3 4 5 6 7 8 9" in run("generate")


def test_a_chat_is_streamed(service) -> None:  # noqa: F811
    service.answer("three four five")

    assert "three four five" in run("chat", service.url)
