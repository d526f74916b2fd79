"""Law: in mode FULL with drafts, full graphs of mixed batches give the tokens of eager steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.engine.model_runner import ModelRunner
from tests.checkpoints import add_next_token_module, make_reference
from tests.engine.conftest import NUM_GUESSABLE
from tests.engine.runners import BLOCK_SIZE, make_runner
from tests.engine.steps.test_modes_law import EAGER, MAX_SEQS, Arrival, arrivals, run
from tests.laws import examples
from tests.plans import make_plan

K = 2
DECODE = tuple((K + 1) * size for size in (1, 2, 4, MAX_SEQS))
FULL = make_plan(*DECODE, mixed=(16, 48), mode="FULL", query_len=K + 1, max_num_seqs=MAX_SEQS)
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"frequency_penalty": 0.5, "logprobs": 2},
]


@pytest.fixture(
    scope="module", params=[("GlmMoeDsa", "auto"), ("GlmMoeDsa", "int8"), ("Glm4Moe", "auto")]
)
def runners(
    npu: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, ModelRunner]:
    """An eager runner, a runner with one step in flight, and a runner with two steps in flight."""
    model, kv_dtype = request.param
    directory: Path = tmp_path_factory.mktemp(model)
    make_reference(f"{model}ForCausalLM", directory, vocab_size=NUM_GUESSABLE)
    add_next_token_module(directory)
    usual = {"dtype": "float32", "kv": {"dtype": kv_dtype, "block_size": BLOCK_SIZE}}
    eager = make_runner(npu, directory, MAX_SEQS, FULL.capture_order, K, usual)
    found = {"eager": eager}
    for in_flight in (1, 2):
        scheduler = {"max_num_seqs": MAX_SEQS, "steps_in_flight": in_flight}
        settings = {**usual, "scheduler": scheduler}
        runner = make_runner(npu, directory, MAX_SEQS, FULL.capture_order, K, settings)
        for graph in FULL.capture_order:
            runner.warm_up(graph)
            runner.capture(graph)
            runner.commit(graph)
        found[f"{in_flight} in flight"] = runner
    return found


@examples(15)
@given(arrivals, st.integers(12, 40), st.sampled_from(SAMPLINGS))
def test_full_graphs_of_mixed_batches_give_the_tokens_of_eager_steps(
    runners: dict[str, ModelRunner],
    arrivals: list[Arrival],
    num_blocks: int,
    sampling: dict[str, Any],
) -> None:
    asked = [
        replace(each, prompt=tuple(token % NUM_GUESSABLE for token in each.prompt), abort_at=None)
        for each in arrivals
    ]
    expected, eager = run(runners["eager"], EAGER, asked, num_blocks, K, **sampling)

    for name in runners.keys() - {"eager"}:
        tokens, scheduler = run(runners[name], FULL, asked, num_blocks, K, **sampling)

        assert tokens == expected, name
        assert not scheduler.dispatcher.misses
        if name == "1 in flight":  # this runner has the same steps and drafts as the eager one
            found, wanted = (each.ranks[0].accepted_by_position for each in (scheduler, eager))
            assert found == wanted
