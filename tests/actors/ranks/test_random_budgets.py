"""Plans for random stream budgets, with both values of the emulator's setting ``accounting``; see
``random_budgets.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.laws import count
from tests.slow import slow

ROOT = Path(__file__).resolve().parents[3]
ROUNDS = count(40)  # 4 rounds; 40 rounds with the hypothesis profile "full"


@pytest.mark.parametrize("accounting", ["pinned", slow("software_sq")])
def test_what_is_negotiated_is_captured_and_one_more_would_not_fit(
    checkpoint: Path, accounting: str
) -> None:
    command = [sys.executable, "-m", "tests.actors.random_budgets"]
    process = subprocess.run(
        [*command, str(checkpoint), accounting, "0", str(ROUNDS)],
        cwd=ROOT,
        env={**os.environ, "TASK_QUEUE_ENABLE": "0"},
        capture_output=True,
        text=True,
    )

    assert process.returncode == 0, process.stdout[-500:] + process.stderr[-3000:]
    outcomes = Counter(line.split()[-1] for line in process.stdout.splitlines() if line)
    assert sum(outcomes[word] for word in ("none", "cut", "all")) == ROUNDS
    # The test is useful only if many budgets are too small for all buckets together.
    assert outcomes["cut"] >= ROUNDS // 4
