"""On a single rank, embeddings of prompts, and scores (the choice between two tokens after a
prompt), equal the results of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.text.rerank import choice_params
from tests.checkpoints import make_prompts, make_reference
from tests.deployments import Answer, greedy_params
from tests.engine.runners import BLOCK_SIZE, MAX_LEN, make_runner, turn
from tests.plans import make_plan
from tests.unit.scheduler.requests import submit

MAX_ROWS = 8
TINY = Path(__file__).parents[3] / "models" / "tiny-qwen3"
PROMPTS = make_prompts((1, 2, 33, 70, 100))


def run(
    npu: Any, directory: Path, params: SamplingParams, prompts: Sequence[list[int]] = PROMPTS
) -> list[list[Answer]]:
    """Run the prompts twice. The second run finds cached prefixes. Return both lists of answers."""
    runner = make_runner(npu, directory, max_tokens=MAX_ROWS)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=MAX_ROWS, max_num_batched_tokens=32),
        [BlockPool(64, BLOCK_SIZE)],
        GraphDispatcher(make_plan()),
        max_model_len=MAX_LEN,
    )
    rounds = []
    for name in ("first", "cached"):
        answers = {f"{name}{i}": Answer() for i in range(len(prompts))}
        for request_id, prompt in zip(answers, prompts, strict=True):
            scheduler.add(submit(request_id, prompt, params))
        while scheduler.has_work:
            for delta in turn(scheduler, runner):
                answers[delta.request_id].take(delta)
        rounds.append(list(answers.values()))
    return rounds


def test_a_decoder_without_a_head_embeds(npu: Any, tmp_path: Path) -> None:
    model = make_reference("Qwen3ForCausalLM")
    model.model.save_pretrained(tmp_path)  # the file contains no head, and its names have no prefix
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(tmp_path)

    for answers in run(npu, tmp_path, greedy_params(1, returns_embedding=True)):
        for answer, prompt in zip(answers, PROMPTS, strict=True):
            with torch.no_grad():
                exact = model.model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
            assert np.abs(np.frombuffer(answer.embedding, "<f4") - exact).max() < 1e-4


def test_a_choice_has_the_probabilities_of_its_two_tokens(npu: Any) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()

    for answers in run(npu, TINY, choice_params(91, 80)):
        for answer, prompt in zip(answers, PROMPTS, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt])).logits[0, -1]
            exact = torch.log_softmax(logits[[91, 80]], -1)
            (row,) = answer.logprobs
            found = [row.ranked()[token][0] for token in (91, 80)]
            assert found == pytest.approx(exact.tolist(), abs=1e-4)
