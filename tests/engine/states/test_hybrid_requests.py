"""Requests of a model with recurrent state run to their end, step by step, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.layers.state_metadata import StateMetadata
from dist_aclgraph.steps.host_step import HostStep
from tests.checkpoints import make_prompts
from tests.engine.runners import Sequences, make_runner
from tests.engine.steps.test_idle_ranks import OTHERS, expected_tokens
from tests.plans import decode_graph, pieces


@pytest.fixture(scope="module", params=[0, 1])
def runner(npu: Any, hybrid: Path, request: pytest.FixtureRequest) -> ModelRunner:
    return make_runner(npu, hybrid, 4, num_drafts=request.param)


def slots_of(runner: ModelRunner) -> list[Tensor]:
    return [tensor.cpu() for tensor in runner.caches.state_tensors()]


def test_a_checkpoint_is_written_before_the_result_is_sent(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the engine has the result, it uses the checkpoint, even if the device is aborted
    after that.
    """
    states, [prompt] = runner._states, make_prompts([32])
    assert states is not None
    slots, sent = states._slots, list[list[Tensor]]()
    row, checkpoint = 1, slots.count - slots.num_checkpoints + 2
    queue: Callable[..., Any] = runner._output.queue

    def note(*args: Any) -> Any:
        sent.append(slots_of(runner))
        return queue(*args)

    monkeypatch.setattr(runner._output, "queue", note)
    sequences = Sequences(runner, [[1], prompt])

    sequences.step(None, [row, 0, 32, 0], started=(sequences.start(1),), kept=pack_ints([row, 2]))

    for before, after in zip(sent[0], slots_of(runner), strict=True):
        assert torch.equal(before[checkpoint], after[1 + row * slots.num_places])
        assert before[checkpoint].any()


@pytest.mark.parametrize("samples", [0, 1])
def test_the_last_token_of_a_prompt_changes_the_state_by_one_rule(
    npu: Any, hybrid: Path, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    """A new request samples a token after its prompt. A request that continues in another group has
    its next token already, so it samples none.
    """
    runner = make_runner(npu, hybrid, 4)
    states, noted = runner._states, list[StateMetadata]()
    assert states is not None
    of_step = states.of_step

    def note(inputs: HostStep) -> StateMetadata:
        noted.append(of_step(inputs))
        return noted[-1]

    monkeypatch.setattr(states, "of_step", note)
    sequences = Sequences(runner, make_prompts([33]))

    sequences.step(None, [0, 0, 32, 0], started=(sequences.start(0),))
    sequences.step(None, [0, 32, 1, samples])

    first, last = noted
    assert first.direct is None
    assert last.prompts is None


GRAPHS = {"decode": decode_graph(4), "pieces": pieces(16)}


@pytest.mark.parametrize("kind", ["eager", *GRAPHS])
def test_steps_of_padding_change_no_state(npu: Any, hybrid: Path, kind: str) -> None:
    """An idle data-parallel rank runs steps on padding. After these steps, the rank's own requests
    continue.
    """
    graph = GRAPHS.get(kind)
    runner = make_runner(npu, hybrid, 8, list(GRAPHS.values()))
    for each in GRAPHS.values():
        runner.warm_up(each)
        runner.capture(each)
        runner.commit(each)
    sequences = Sequences(runner, make_prompts([3, 5, 7]))
    sequences.idle(graph, OTHERS)
    sequences.prefill()

    for _ in range(4):
        before = slots_of(runner)
        sequences.idle(graph, OTHERS)
        assert all(map(same_rows, before, slots_of(runner)))
        sequences.decode(graph)

    assert sequences.tokens == expected_tokens(npu, hybrid)


def same_rows(states: Tensor, others: Tensor) -> bool:
    """Return whether all slots but the slot of padding are equal."""
    return torch.equal(states[1:], others[1:])


def test_two_requests_that_start_from_one_checkpoint_diverge(npu: Any, hybrid: Path) -> None:
    """Both requests start from the same checkpoint, but continue with different tokens."""
    prefix, *rests = make_prompts([32, 5, 5])
    prompts = [prefix + rest for rest in rests]
    runner = make_runner(npu, hybrid, 4)
    sequences = Sequences(runner, [prefix, *prompts])
    sequences.step(None, [0, 0, 32, 0], started=(sequences.start(0),), kept=pack_ints([0, 3]))
    # For the shared prefix, all requests use the first request's blocks.
    starts = [
        msgspec.structs.replace(sequences.start(row), block_ids=pack_ints([1, 4 * row + 2]))
        for row in (1, 2)
    ]
    sequences.step(
        None, [1, 32, 5, 1, 2, 32, 5, 1], started=tuple(starts), restored=pack_ints([1, 3, 2, 3])
    )

    expected = Sequences(make_runner(npu, hybrid, 4), prompts)
    expected.prefill()
    assert sequences.new[1:] == expected.new
