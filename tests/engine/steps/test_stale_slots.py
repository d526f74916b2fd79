"""``stale_slots`` detects a request that reads recurrent states that were not written for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.kv.checkpoints import Checkpoints
from tests.checkpoints import make_prompts
from tests.engine.runners import FLOAT32, Sequences, make_runner
from tests.engine.stale_slots import poison_stale_slots
from tests.engine.steps.test_modes_law import EAGER, MAX_SEQS, Arrival, run


@pytest.mark.parametrize("source", ["row of an earlier request", "free checkpoint", "checkpoint"])
def test_only_a_stored_checkpoint_can_be_read(npu: Any, hybrid: Path, source: str) -> None:
    runner, checkpoints = make_runner(npu, hybrid, MAX_SEQS), Checkpoints(2, 1)
    arrivals = [Arrival(0, tuple(range(40)), 3, None)]
    poison = partial(poison_stale_slots, runner)
    run(runner, EAGER, arrivals, 20, checkpoints=checkpoints, after_turn=poison)
    [stored] = checkpoints._stored.values()
    restored = {"checkpoint": [0, stored], "free checkpoint": [0, 1 - stored]}.get(source, [])
    sequences = Sequences(runner, make_prompts([37]))

    # The step continues after the row's first 32 tokens, so it reads a state.
    result = sequences.step(
        None, [0, 32, 5, 1], started=(sequences.start(0),), restored=pack_ints(restored)
    )

    assert bool(result.non_finite) == (source != "checkpoint")


@pytest.mark.parametrize("strict", [True, False])
def test_the_strict_emulator_gives_a_request_a_row_without_state(
    npu: Any, hybrid: Path, strict: bool
) -> None:
    """An earlier request has left its state in a row. If the next request reads this state, the
    strict emulator makes the request's result NaN.
    """
    device = {"device": {"emulator": {"strict": strict}}}
    sequences = Sequences(
        make_runner(npu, hybrid, MAX_SEQS, settings=FLOAT32 | device), make_prompts([37])
    )
    sequences.prefill()

    result = sequences.step(None, [0, 32, 5, 1], started=(sequences.start(0),))

    assert bool(result.non_finite) == strict


def test_the_state_after_a_rejected_draft_cannot_be_read(npu: Any, hybrid: Path) -> None:
    """Random drafts are rejected, so the request must continue from its first slot."""
    runner = make_runner(npu, hybrid, MAX_SEQS, num_drafts=1)
    is_nan = []

    def note(scheduler: Any) -> None:
        poison_stale_slots(runner, scheduler)
        slots = runner.caches.state_tensors()[0].isnan().flatten(1).any(1).cpu()
        is_nan.append([bool(slots[1 + place]) for place in range(2)])

    arrivals = [Arrival(0, tuple(range(40)), 6, None)]
    _, scheduler = run(
        runner, EAGER, arrivals, 20, 1, checkpoints=Checkpoints(2, 1), after_turn=note
    )

    assert scheduler.ranks[0].accepted_by_position == [0]
    assert is_nan[0] == [False, True]
    assert is_nan[-1] == [True, True]
