"""A decoder that was stored without its head embeds, beside requests for text, on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.scheduler.scheduler import Scheduler
from tests.checkpoints import make_prompts, make_reference
from tests.deployments import Answer, greedy_params
from tests.engine.runners import BLOCK_SIZE, MAX_LEN, make_runner, turn
from tests.plans import make_plan
from tests.unit.scheduler.requests import submit

MAX_ROWS = 8


@pytest.fixture(scope="module")
def reference(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("headless")
    model = make_reference("Qwen3ForCausalLM", directory)
    model.model.save_pretrained(directory)  # the names have no prefix, and there is no head
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(directory)
    return directory, model.model


def test_a_decoder_without_a_head_embeds_as_in_transformers(npu: Any, reference: Any) -> None:
    directory, model = reference
    runner = make_runner(npu, directory, max_tokens=MAX_ROWS)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=MAX_ROWS, max_num_batched_tokens=32),
        [BlockPool(64, BLOCK_SIZE)],
        GraphDispatcher(make_plan()),
        max_model_len=MAX_LEN,
    )
    prompts = make_prompts((1, 2, 33, 70, 100))
    answers: dict[str, Answer] = {}
    for name in ("first", "cached"):
        for i, prompt in enumerate(prompts):
            answers[f"{name}{i}"] = Answer()
            params = greedy_params(1, returns_embedding=True)
            scheduler.add(submit(f"{name}{i}", prompt, params))
        while scheduler.has_work:
            for delta in turn(scheduler, runner):
                answers[delta.request_id].take(delta)

    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            exact = model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
        for name in ("first", "cached"):
            found = np.frombuffer(answers[f"{name}{i}"].embedding, "<f4")
            assert np.abs(found - exact).max() < 1e-4
