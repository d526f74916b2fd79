"""Requests with various features get the same tokens, however the ranks share contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dist_aclgraph.sampling import SamplingParams
from tests.checkpoints import make_prompts
from tests.deployments import Answer, make_deployment_config
from tests.lockstep import Lockstep, lockstep

DEMO = Path(__file__).parents[3] / "models" / "tiny-deepseek"
BLOCK_SIZE, MAX_LEN = 16, 256
# (tp, pcp, dcp) of two ranks. In the first layout, each rank computes and caches all tokens. In the
# other layouts, the ranks divide the cached tokens, the tokens of prompts, or both.
LAYOUTS = [(2, 1, 1), (2, 1, 2), (1, 2, 1), (1, 2, 2)]
STEM, *OTHERS = make_prompts((90, 1, 30, 30, 60, 17, 100, 20))


class Request(NamedTuple):
    at_step: int
    prompt: list[int]
    sampling: dict[str, Any]
    abort_at: int | None = None


REQUESTS = [
    Request(0, OTHERS[0], {"temperature": 1.0, "seed": 3}),
    Request(0, STEM + OTHERS[1], {"logprobs": 3}),
    Request(1, OTHERS[5], {"frequency_penalty": 0.7, "presence_penalty": 0.3}),
    Request(2, OTHERS[3], {}, abort_at=9),
    Request(12, STEM + OTHERS[2], {"repetition_penalty": 1.4, "logprobs": 1}),
    Request(12, STEM + OTHERS[2], {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 8}),
    Request(13, OTHERS[4], {"temperature": 1.2, "seed": 5, "repetition_penalty": 1.1}),
    Request(14, OTHERS[6], {"min_tokens": 5, "logprobs": 2}),
]


def play(group: Lockstep) -> list[Answer]:
    answers: dict[int, Answer] = {}
    step = 0
    while len(answers) < len(REQUESTS) or group.scheduler.has_work:
        for index, request in enumerate(REQUESTS):
            if request.at_step == step:
                settings = {"temperature": 0.0, "ignore_eos": True, **request.sampling}
                params = SamplingParams(max_tokens=40, **settings)
                answers[index] = group.submit(str(index), request.prompt, params)
            if request.abort_at == step:
                group.abort(str(index))
        group.turn()
        step += 1
    return [answers[index] for index in range(len(REQUESTS))]


@pytest.fixture(scope="module")
def found(npu: Any) -> dict[tuple[int, int, int], list[Answer]]:
    answers = {}
    for tp, pcp, dcp in LAYOUTS:
        config = make_deployment_config(
            DEMO,
            max_model_len=MAX_LEN,
            parallel={"tp": tp, "pcp": pcp, "dcp": dcp, "cp_interleave": 4},
            graph={
                "mode": "FULL_AND_PIECEWISE",
                "sizes": (2, 6, 12),
                "mixed_sizes": (16, 64),
                "lazy": "off",
            },
            scheduler={"max_num_seqs": 6, "max_num_batched_tokens": 64},
            speculative={"num_tokens": 1},
            # The cache has only a few blocks more than one request of full length needs, so some
            # requests are preempted.
            kv={"block_size": BLOCK_SIZE, "num_blocks": 2 + (MAX_LEN + 64) // BLOCK_SIZE // dcp},
        )
        with lockstep(config) as group:
            answers[tp, pcp, dcp] = play(group)
            report, scheduler = group.report(), group.scheduler
        assert scheduler.num_preemptions > 0
        assert all(rank.pool.num_used == 0 for rank in scheduler.ranks)
        assert any(bucket["replays"] for bucket in report["buckets"])
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_tokens_and_their_probabilities_are_those_of_ranks_that_share_nothing(
    found: dict[tuple[int, int, int], list[Answer]], layout: tuple[int, int, int]
) -> None:
    for request, answer, wanted in zip(REQUESTS, found[layout], found[LAYOUTS[0]], strict=True):
        length = min(len(answer.tokens), len(wanted.tokens))
        assert length == 40 or request.abort_at is not None
        assert answer.tokens[:length] == wanted.tokens[:length]
        if "logprobs" not in request.sampling:
            assert not any(answer.logprobs)
            continue
        for mine, theirs in zip(answer.logprobs, wanted.logprobs, strict=True):
            assert mine is not None and theirs is not None
            assert mine.rank == theirs.rank
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
