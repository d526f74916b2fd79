from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.device import emulator
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.errors import ReplayMismatchError
from tests.checkpoints import make_prompts
from tests.engine.runners import MAX_LEN, Sequences, make_runner

BUCKETS = (8, 4, 2, 1)


@pytest.fixture
def runner(npu: Any, checkpoint: Path) -> ModelRunner:
    return make_runner(npu, checkpoint)


def test_replayed_tokens_equal_eager_ones_at_every_batch_size(
    npu: Any, checkpoint: Path, runner: ModelRunner
) -> None:
    for bucket in BUCKETS:
        runner.warm_up(bucket)
        runner.capture(bucket)
    eager, prompts = make_runner(npu, checkpoint), make_prompts([3, 30, 31, 32, 33, 60, 1, 64])
    replayed, plain = Sequences(runner, prompts), Sequences(eager, prompts)
    replayed.prefill()
    plain.prefill()

    for live in (8, 7, 5, 4, 3, 2, 1, 8, 1, 4, 8):
        replayed.decode("FULL", min(b for b in BUCKETS if b >= live), live)
        plain.decode("NONE", live, live)

    assert replayed.tokens == plain.tokens


def test_steps_after_a_right_guess_send_no_lengths(runner: ModelRunner) -> None:
    runner.capture(4)
    sequences = Sequences(runner, make_prompts([3, 5, 7]))
    sequences.prefill()
    sequences.decode("FULL", 4)

    updates = []
    for live in (3, 3, 2):
        before = emulator.counters()["task_updates"]
        sequences.decode("FULL", 4, live)
        updates.append(emulator.counters()["task_updates"] - before)

    ahead = runner._model.spec.num_layers
    assert updates == [ahead, ahead, 2 * ahead]  # the last guess was wrong


def test_nothing_is_guessed_beyond_the_context(runner: ModelRunner) -> None:
    runner.capture(1)
    sequences = Sequences(runner, make_prompts([MAX_LEN - 3]))
    sequences.prefill()

    for _ in range(3):
        sequences.decode("FULL", 1)

    assert len(sequences.tokens[0]) == MAX_LEN + 1


def test_a_graph_may_go_while_lengths_for_it_were_sent_ahead(runner: ModelRunner) -> None:
    sequences = Sequences(runner, make_prompts([3]))
    sequences.prefill()
    for _ in range(3):
        runner.capture(1)
        sequences.decode("FULL", 1)
        runner.release(1)
        runner.prepare_next(lambda: False)


def test_a_bucket_that_was_not_captured_is_refused(runner: ModelRunner) -> None:
    sequences = Sequences(runner, make_prompts([3]))
    sequences.prefill()

    with pytest.raises(ReplayMismatchError, match="bucket 4"):
        sequences.decode("FULL", 4)


def test_a_capture_works_after_the_only_graph_was_released(runner: ModelRunner) -> None:
    runner.capture(8)
    runner.release(8)

    runner.capture(4)

    sequences = Sequences(runner, make_prompts([3, 5]))
    sequences.prefill()
    sequences.decode("FULL", 4)


def test_release_of_what_was_never_captured_is_ignored(runner: ModelRunner) -> None:
    runner.release(8)


def test_all_graphs_together_take_the_memory_of_the_largest(npu: Any, checkpoint: Path) -> None:
    runner = make_runner(npu, checkpoint, 64)

    costs = [runner.capture(bucket).bytes for bucket in (64, 56, 48, 40, 32, 16, 8, 4, 2, 1)]

    assert costs[0] > 0
    assert sum(costs) <= 1.05 * costs[0]
    assert runner.pool_bytes == sum(costs)


FEW_STREAMS = """
from pathlib import Path
from dist_aclgraph.config import make_config
from dist_aclgraph.device.npu import open_npu
from dist_aclgraph.errors import StreamExhaustedError
emulator = {"strict": False, "streams": 40}
config = make_config({"model": "-", "device": {"kind": "emulated", "emulator": emulator}})
npu = open_npu(config.device, 0)
from tests.checkpoints import make_prompts
from tests.engine.runners import MAX_LEN, Sequences, make_runner
runner = make_runner(npu, Path(DIRECTORY), 32)
captured = []
try:
    for bucket in range(32, 0, -1):
        runner.capture(bucket)
        captured.append(bucket)
except StreamExhaustedError:
    print("refused after", len(captured))
runner.release(captured.pop(1))
runner.capture(1)
sequences = Sequences(runner, make_prompts([3]))
sequences.prefill()
sequences.decode("FULL", captured[0])
sequences.decode("FULL", 1)
print("captured again")
"""


def test_captures_end_with_the_streams_and_go_on_after_a_release(checkpoint: Path) -> None:
    script = FEW_STREAMS.replace("DIRECTORY", repr(str(checkpoint)))

    done = subprocess.run(
        [sys.executable, "-u", "-c", script], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert "refused after" in done.stdout
    assert "captured again" in done.stdout
