"""If data-parallel ranks have batches of different sizes, smaller batches are padded, and idle
ranks run padding only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.steps.step import RankBatch
from tests.checkpoints import make_prompts
from tests.engine.runners import Sequences, make_runner
from tests.plans import decode_graph, mixed_graph, pieces

GRAPHS = {"decode": decode_graph(4), "full": mixed_graph(16, 8), "pieces": pieces(16)}
OTHERS = RankBatch(pack_ints([0, 0, 11, 1, 1, 5, 1, 1]))  # another rank runs twelve tokens


def make_captured(npu: Any, checkpoint: Path, exchange: Any = None) -> ModelRunner:
    graphs = list(GRAPHS.values())
    runner = make_runner(npu, checkpoint, 8, graphs, choose_exchange=lambda n: exchange)
    for graph in GRAPHS.values():
        runner.warm_up(graph)
        runner.capture(graph)
        runner.commit(graph)
    return runner


@pytest.fixture
def runner(npu: Any, checkpoint: Path) -> ModelRunner:
    return make_captured(npu, checkpoint)


def expected_tokens(npu: Any, checkpoint: Path) -> list[list[int]]:
    alone = Sequences(make_runner(npu, checkpoint), make_prompts([3, 5, 7]))
    alone.prefill()
    for _ in range(4):
        alone.decode(None)
    return alone.tokens


@pytest.mark.parametrize("exchange", [None, "all_gather"])
@pytest.mark.parametrize("kind", ["eager", *GRAPHS])
def test_an_idle_rank_runs_along_and_changes_nothing(
    npu: Any, checkpoint: Path, kind: str, exchange: Any
) -> None:
    graph = GRAPHS.get(kind)
    sequences = Sequences(make_captured(npu, checkpoint, exchange), make_prompts([3, 5, 7]))
    sequences.exchange = exchange
    sequences.idle(graph, OTHERS)
    sequences.prefill()

    for _ in range(4):
        result = sequences.idle(graph, OTHERS)
        assert (result.rank, result.token_ids, result.logprobs) == (1, b"", ())
        sequences.decode(graph)

    assert sequences.tokens == expected_tokens(npu, checkpoint)


def test_an_eager_step_is_padded_to_the_largest_batch(
    npu: Any, checkpoint: Path, runner: ModelRunner
) -> None:
    sequences = Sequences(runner, make_prompts([3, 5, 7]))
    sequences.exchange, sequences.beside = "all_gather", (OTHERS,)
    seen = []
    forward = runner._model.forward

    def watched(token_ids: Any, positions: Any, slots: Any, *others: Any, **named: Any) -> Any:
        seen.append((len(token_ids), slots.cpu().tolist().count(-1), named["step"].exchange))
        return forward(token_ids, positions, slots, *others, **named)

    runner._model.forward = watched
    sequences.prefill()
    for _ in range(4):
        sequences.decode(None)

    assert seen == [(15, 0, "all_gather"), *[(12, 9, "all_gather")] * 4]
    assert sequences.tokens == expected_tokens(npu, checkpoint)


def test_the_experts_tally_is_reported_by_step(runner: ModelRunner) -> None:
    sequences = Sequences(runner, make_prompts([3]))
    sequences.exchange = "mc2"
    forward = runner._model.forward

    def counting(*inputs: Any, step: Any) -> Any:
        step.tally.add_(step.tally.new_tensor([12, 2]))
        return forward(*inputs, step=step)

    runner._model.forward = counting
    found = [sequences.idle(None, OTHERS) for _ in range(3)]

    assert [(r.expert_tokens, r.num_unplaced) for r in found] == [(12, 2), (24, 2), (36, 2)]


def test_a_rank_without_samples_runs_the_head_where_another_samples(runner: ModelRunner) -> None:
    sequences = Sequences(runner, make_prompts([3]))
    sequences.exchange = "all_gather"
    rows = []
    logits = runner._model.logits

    def watched(hidden: Any) -> Any:
        rows.append(len(hidden))
        return logits(hidden)

    runner._model.logits = watched  # type: ignore[method-assign, assignment]
    assert sequences.idle(None, OTHERS).token_ids == b""
    assert rows == [1]

    sequences.idle(None, RankBatch(pack_ints([0, 0, 11, 0])))  # the prompt continues later
    assert rows == [1]
