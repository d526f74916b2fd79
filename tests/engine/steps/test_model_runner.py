from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.device import emulator
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.errors import ReplayMismatchError
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.step import RankBatch, RankPlan, StepResult
from tests.checkpoints import make_prompts
from tests.engine.runners import MAX_LEN, Sequences, make_runner
from tests.plans import decode_graph, mixed_graph, pieces

BUCKETS = (8, 4, 2, 1)


def capture(runner: ModelRunner, graph: BatchDescriptor) -> None:
    runner.warm_up(graph)
    runner.capture(graph)
    runner.commit(graph)


@pytest.fixture
def runner(npu: Any, checkpoint: Path) -> ModelRunner:
    return make_runner(npu, checkpoint)


@pytest.fixture
def guessing(npu: Any, checkpoint: Path) -> ModelRunner:
    """A runner with one step in flight. During the step, the runner guesses the lengths of the next
    step, and sends updates with these lengths.
    """
    scheduler = {"max_num_seqs": 8, "steps_in_flight": 1}
    return make_runner(npu, checkpoint, settings={"dtype": "float32", "scheduler": scheduler})


@pytest.mark.parametrize("model", ["checkpoint", "deepseek"])
def test_replayed_tokens_equal_eager_ones_at_every_batch_size(
    npu: Any, request: pytest.FixtureRequest, model: str
) -> None:
    checkpoint = request.getfixturevalue(model)
    runner = make_runner(npu, checkpoint)
    for bucket in BUCKETS:
        capture(runner, decode_graph(bucket))
    eager, prompts = make_runner(npu, checkpoint), make_prompts([3, 30, 31, 32, 33, 60, 1, 64])
    replayed, plain = Sequences(runner, prompts), Sequences(eager, prompts)
    replayed.prefill()
    plain.prefill()

    for live in (8, 7, 5, 4, 3, 2, 1, 8, 1, 4, 8):
        replayed.decode(decode_graph(min(b for b in BUCKETS if b >= live)), live)
        plain.decode(None, live)

    assert replayed.tokens == plain.tokens


@pytest.mark.parametrize("kind", ["full", "piecewise"])
def test_mixed_batches_replay_the_tokens_of_eager_steps(
    npu: Any, checkpoint: Path, kind: str
) -> None:
    graphs = [pieces(b) if kind == "piecewise" else mixed_graph(b, 8) for b in (64, 32, 16, 8)]
    runner = make_runner(npu, checkpoint, 8, graphs)
    for graph in graphs:
        capture(runner, graph)
    prompts = make_prompts([3, 30, 31, 32, 33, 60])
    replayed = Sequences(runner, prompts)
    plain = Sequences(make_runner(npu, checkpoint, 8), prompts)

    for sequences in (replayed, plain):
        for records, started in mixed_schedule(sequences):
            fits = [g for g in graphs if g.num_tokens >= sum(records[2::4])]
            graph = fits[-1] if sequences is replayed else None
            sequences.step(graph, records, **started)

    assert replayed.tokens == plain.tokens
    assert [len(new) for new in plain.new] == [13, 11, 9, 7, 5, 3]


def mixed_schedule(sequences: Sequences) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Yield steps in which a prompt runs in two chunks while the other requests decode."""
    for newest in range(len(sequences.tokens)):
        start = sequences.start(newest)
        prompt = len(sequences.tokens[newest])
        first = prompt // 2
        if first:
            rows, appended = sequences.decoding(newest)
            yield [*rows, newest, 0, first, 0], {"started": (start,), "appended": appended}
        rows, appended = sequences.decoding(newest)
        batch = {"appended": appended} if first else {"started": (start,), "appended": appended}
        yield [*rows, newest, first, prompt - first, 1], batch
    for _ in range(2):
        rows, appended = sequences.decoding(len(sequences.tokens))
        yield rows, {"appended": appended}


def test_steps_after_a_right_guess_send_no_lengths(npu: Any, guessing: ModelRunner) -> None:
    capture(guessing, decode_graph(4))
    sequences = Sequences(guessing, make_prompts([3, 5, 7]))
    sequences.prefill()
    sequences.decode(decode_graph(4))
    npu.synchronize()

    updates = []
    for live in (3, 3, 2):
        before = emulator.counters()["task_updates"]
        sequences.decode(decode_graph(4), live)
        npu.synchronize()  # the updates that were sent ahead run during the step
        updates.append(emulator.counters()["task_updates"] - before)

    ahead = guessing._model.spec.num_layers
    # The last guess of the lengths was wrong, so the lengths were sent a second time.
    assert updates == [ahead, ahead, 2 * ahead]


def test_nothing_is_guessed_beyond_the_context(guessing: ModelRunner) -> None:
    capture(guessing, decode_graph(1))
    sequences = Sequences(guessing, make_prompts([MAX_LEN - 3]))
    sequences.prefill()

    for _ in range(3):
        sequences.decode(decode_graph(1))

    assert len(sequences.tokens[0]) == MAX_LEN + 1


def test_a_graph_may_go_while_lengths_for_it_were_sent_ahead(guessing: ModelRunner) -> None:
    sequences = Sequences(guessing, make_prompts([3]))
    sequences.prefill()
    for _ in range(3):
        capture(guessing, decode_graph(1))
        sequences.decode(decode_graph(1))
        guessing.release(decode_graph(1))
        guessing.prepare_next(lambda: False)


def test_a_bucket_that_was_not_captured_is_refused(runner: ModelRunner) -> None:
    sequences = Sequences(runner, make_prompts([3]))
    sequences.prefill()

    with pytest.raises(ReplayMismatchError, match="asks for full decode 4"):
        sequences.decode(decode_graph(4))


def test_a_capture_works_after_the_only_graph_was_released(runner: ModelRunner) -> None:
    runner.capture(decode_graph(8))
    runner.commit(decode_graph(8))
    runner.release(decode_graph(8))

    runner.capture(decode_graph(4))
    runner.commit(decode_graph(4))

    sequences = Sequences(runner, make_prompts([3, 5]))
    sequences.prefill()
    sequences.decode(decode_graph(4))


def test_a_capture_uses_the_memory_of_a_released_capture_again(
    npu: Any, runner: ModelRunner
) -> None:
    runner.warm_up(decode_graph(8))
    free = []

    for _ in range(4):
        runner.capture(decode_graph(8))
        free.append(npu.memory().free_bytes)
        runner.release(decode_graph(8))

    assert free[0] - free[-1] < 1 << 20  # a graph's memory pool has at least 2 MiB


def test_release_of_what_was_never_captured_is_ignored(runner: ModelRunner) -> None:
    runner.release(decode_graph(8))


SIZES = (64, 56, 48, 40, 32, 16, 8, 4, 2, 1)
GRAPHS = {
    "decode": [decode_graph(b) for b in SIZES],
    "full": [mixed_graph(b, 64) for b in SIZES],
    "piecewise": [pieces(b) for b in SIZES],
    "both": [g for b in SIZES for g in (pieces(b), decode_graph(b))],
}


@pytest.mark.parametrize("kind", GRAPHS)
def test_all_graphs_together_take_the_memory_of_the_largest(
    npu: Any, checkpoint: Path, kind: str
) -> None:
    graphs = GRAPHS[kind]
    runner = make_runner(npu, checkpoint, 64, graphs)

    costs = [runner.capture(graph).bytes for graph in graphs]

    assert costs[0] > 0
    assert runner.pool_memory.total_bytes == sum(costs) <= 1.05 * costs[0]
    assert runner.pool_memory.live_bytes == 0


FEW_STREAMS = """
from pathlib import Path
from dist_aclgraph.config import make_config
from dist_aclgraph.device.npu import open_npu
from dist_aclgraph.errors import StreamExhaustedError
emulator = {"strict": False, "streams": 40}
config = make_config({"model": "-", "device": {"kind": "emulated", "emulator": emulator}})
npu = open_npu(config.device, 0)
from tests.checkpoints import make_prompts
from tests.engine.runners import Sequences, make_runner
from tests.plans import decode_graph
runner = make_runner(npu, Path(DIRECTORY), 32)
graphs = [decode_graph(bucket) for bucket in range(32, 0, -1)]
captured = []
try:
    for graph in graphs:
        runner.capture(graph)
        runner.commit(graph)
        captured.append(graph)
except StreamExhaustedError:
    print("refused after", len(captured))
runner.release(captured.pop(1))
runner.capture(graphs[-1])
runner.commit(graphs[-1])
sequences = Sequences(runner, make_prompts([3]))
sequences.prefill()
sequences.decode(captured[0])
sequences.decode(graphs[-1])
print("captured again")
"""


@pytest.mark.slow
def test_captures_end_with_the_streams_and_go_on_after_a_release(checkpoint: Path) -> None:
    script = FEW_STREAMS.replace("DIRECTORY", repr(str(checkpoint)))

    done = subprocess.run(
        [sys.executable, "-u", "-c", script], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert "refused after" in done.stdout
    assert "captured again" in done.stdout


def two_steps(runner: ModelRunner) -> tuple[RankPlan, RankPlan]:
    """Compute two prompts; return the plans of the two decode steps that follow."""
    sequences = Sequences(runner, make_prompts([3, 5]))
    sequences.prefill()
    rows, appended = sequences.decoding(2)
    first = RankPlan(1, 2, 1, None, 0, RankBatch(pack_ints(rows), appended))
    behind = [x for row in range(2) for x in (row, len(sequences.tokens[row]), 1, 1)]
    return first, RankPlan(1, 3, 1, None, 0, RankBatch(pack_ints(behind)))


def test_a_step_that_has_ended_is_answered_while_the_next_is_queued(
    npu: Any, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, second), order = two_steps(runner), list[Any]()
    head = runner._model.logits
    monkeypatch.setattr(runner._model, "logits", lambda *a: order.append("head") or head(*a))

    runner.launch(first, 0, order.append)
    npu.synchronize()
    runner.launch(second, 0, order.append)

    assert [getattr(what, "step", what) for what in order] == ["head", 2, "head"]
    assert order[1].waited_us == 0  # the device had to wait for the host
    runner.finish()


def test_a_result_tells_how_long_only_the_device_has_delayed_it(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, second), results = two_steps(runner), list[StepResult]()
    monkeypatch.setattr(runner._output, "is_here", lambda coming: False)

    runner.launch(first, 0, results.append)
    runner.launch(second, 0, results.append)
    results.append(runner.finish())

    assert [result.step for result in results] == [2, 3]
    assert results[0].waited_us > 0
    assert results[1].waited_us == 0  # no later step was queued
