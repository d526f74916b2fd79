"""Whole deployments generate the same tokens as transformers."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.config import Config
from dist_aclgraph.planning.buckets import asked_sizes
from dist_aclgraph.steps.step import RowLogprobs
from tests.checkpoints import ARCHITECTURES, logprobs
from tests.deployments import (
    ANSWER_S,
    Answer,
    deployed,
    greedy_params,
    make_deployment_config,
    serving,
)
from tests.lockstep import lockstep
from tests.parity.conftest import NUM_TOKENS, Reference
from tests.slow import rare, slow

TP_OF = {architecture: 1 + index % 2 for index, architecture in enumerate(ARCHITECTURES)}
# Each architecture runs with graphs on one rank and eagerly on two ranks, or eagerly on one rank
# and with graphs on two ranks. For each kind of attention, make test runs one architecture with
# graphs; make test-more runs the same architecture eagerly.
KINDS = {
    "Qwen3ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "Qwen3NextForCausalLM",
    "KimiLinearForCausalLM",
}


def crossed(architecture: str, tp: int) -> list[Any]:
    graphs, eager = (architecture, tp, "FULL_DECODE_ONLY"), (architecture, 3 - tp, "NONE")
    return [graphs, slow(*eager)] if architecture in KINDS else [slow(*graphs), rare(*eager)]


CROSS = [
    ("Qwen3ForCausalLM", TP_OF["Qwen3ForCausalLM"], "NONE"),
    *(each for architecture, tp in TP_OF.items() for each in crossed(architecture, tp)),
]


@pytest.mark.parametrize(("architecture", "tp", "mode"), CROSS)
def test_greedy_tokens_equal_those_of_transformers(
    references: Any, architecture: str, tp: int, mode: str
) -> None:
    reference = references(architecture)
    config = make_deployment_config(reference.directory, parallel={"tp": tp}, graph={"mode": mode})

    with lockstep(config) as group:
        answers = group.generate(reference.prompts, greedy_params(NUM_TOKENS))
        report = group.report()

    assert [answer.tokens for answer in answers] == reference.tokens
    assert_replays_where_it_may(report, mode)


def assert_replays_where_it_may(report: dict[str, Any], mode: str) -> None:
    if mode == "NONE":
        assert report["buckets"] == []
        assert set(report["eager_steps"]) == {"mode_none"}
    else:
        assert sum(bucket["replays"] for bucket in report["buckets"]) >= NUM_TOKENS - 1
        assert set(report["eager_steps"]) <= {"prefill", "mixed"}


@deployed
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
def test_a_deployment_reports_what_it_replayed(references: Any, mode: str) -> None:
    reference = references("Qwen3ForCausalLM")
    config = make_deployment_config(reference.directory, graph={"mode": mode})

    with serving(config) as service:
        answers = service.generate(reference.prompts, greedy_params(NUM_TOKENS))
        report = service.report()

    assert [answer.tokens for answer in answers] == reference.tokens
    assert_replays_where_it_may(report, mode)


@pytest.mark.slow
def test_kv_heads_are_repeated_where_ranks_outnumber_them(references: Any) -> None:
    reference = references("Qwen3ForCausalLM")

    with lockstep(make_deployment_config(reference.directory, parallel={"tp": 4})) as group:
        answers = group.generate(reference.prompts, greedy_params(NUM_TOKENS))

    assert [answer.tokens for answer in answers] == reference.tokens


def test_batches_shrink_and_grow_through_every_bucket_edge(references: Any) -> None:
    reference = references("Qwen3ForCausalLM")
    config = make_deployment_config(
        reference.directory, parallel={"tp": 2}, graph={"sizes": (1, 2, 4, 8, 12)}
    )

    # Request i ends after 2 + 2 i tokens, so the batch has every size from 12 down to 1.
    with lockstep(config) as group:
        for wave in range(2):
            answers = [
                group.submit(f"{wave}-{i}", prompt, greedy_params(2 + 2 * i))
                for i, prompt in enumerate(reference.prompts)
            ]
            group.finish()
            for i, answer in enumerate(answers):
                assert answer.tokens == reference.tokens[i][: 2 + 2 * i]
        buckets = group.report()["buckets"]

    assert len(buckets) == 5
    assert all(bucket["replays"] > 0 for bucket in buckets)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", slow("DeepseekV3ForCausalLM")])
def test_replay_goes_far_beyond_the_captured_kv_length(references: Any, architecture: str) -> None:
    reference = references(architecture)
    prompt, count = reference.prompts[4], 440

    with lockstep(make_deployment_config(reference.directory, kv={"block_size": 32})) as group:
        [answer] = group.generate([prompt], greedy_params(count))
        report = group.report()

    # transformers finds each token the most probable one after the previous tokens.
    assert answer.tokens == logprobs(reference.model, prompt, answer.tokens).argmax(-1).tolist()
    assert len(answer.tokens) == count
    assert_replays_where_it_may(report, "FULL_DECODE_ONLY")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "forms_agree"),
    # Latent attention has two forms, which round results differently. The other requests of the
    # step decide which form computes a request.
    [
        ("Qwen3ForCausalLM", True),
        ("DeepseekV3ForCausalLM", False),
        rare("Glm4MoeForCausalLM", True),
        rare("MiniMaxM2ForCausalLM", True),
        ("GptOssForCausalLM", True),
    ],
)
def test_strict_bfloat16_logprobs_lie_near_those_of_transformers(
    references: Any, architecture: str, forms_agree: bool
) -> None:
    reference = references(architecture)
    tokens = {}
    for mode in ("NONE", "FULL_DECODE_ONLY"):
        config = make_deployment_config(
            reference.directory,
            dtype="bfloat16",
            graph={"mode": mode},
            device={"emulator": {"strict": True}},
        )
        with lockstep(config) as group:
            plain = group.generate(reference.prompts, greedy_params(NUM_TOKENS))
            first = group.generate(reference.prompts, greedy_params(1, logprobs=20), "l")
        tokens[mode] = [answer.tokens for answer in plain]
        assert_logprobs_near(reference, [answer.logprobs[0] for answer in first])

    if forms_agree:
        assert tokens["NONE"] == tokens["FULL_DECODE_ONLY"]


def assert_a_strict_device_takes_every_call(
    reference: Reference, config: Config, num_tokens: int
) -> None:
    """Generate tokens on a strict device, which refuses wrong calls, and compare the
    log-probabilities of the first tokens.
    """
    assert config.device.emulator.strict
    with lockstep(config) as group:
        group.generate(reference.prompts, greedy_params(num_tokens))
        first = group.generate(reference.prompts, greedy_params(1, logprobs=20), "l")

    assert_logprobs_near(reference, [answer.logprobs[0] for answer in first])


def assert_logprobs_near(reference: Reference, rows: list[RowLogprobs]) -> None:
    model = copy.deepcopy(reference.model).bfloat16()
    for prompt, row in zip(reference.prompts, rows, strict=True):
        ids = unpack_ints(row.token_ids).tolist()
        with torch.no_grad():
            logits = [m(torch.tensor([prompt])).logits[0, -1] for m in (reference.model, model)]
        exact, rounded = (torch.log_softmax(x.float(), -1)[ids] for x in logits)
        found = torch.tensor(row.logprobs)
        # The allowed error is three times the largest error of transformers in bfloat16, plus 0.02.
        allowed = 3 * (rounded - exact).abs().max() + 0.02
        assert (found - exact).abs().max() <= allowed


@dataclass(frozen=True)
class Arrival:
    """A request of a random schedule.

    Attributes:
        prompt: index of its prompt.
        count: number of tokens that it generates.
        steps: number of steps until the next request arrives.
        aborts: index of an earlier request that the test aborts after it has submitted this
            request.
    """

    prompt: int
    count: int
    steps: int
    aborts: int | None


def make_traffic(reference: Reference, seed: int) -> list[Arrival]:
    random = np.random.default_rng(seed)
    return [
        Arrival(
            int(random.integers(len(reference.prompts))),
            int(random.integers(1, NUM_TOKENS + 1)),
            int(random.integers(0, 4)),
            int(random.integers(index + 1)) if random.random() < 0.2 else None,
        )
        for index in range(40)
    ]


def make_narrow_config(reference: Reference, mode: str) -> Config:
    """Return a configuration with two ranks, and with fewer KV blocks than all requests together
    need.
    """
    return make_deployment_config(
        reference.directory,
        parallel={"tp": 2},
        graph={"mode": mode, **asked_sizes(mode, (1, 4, 9, 12), (8, 64))},
        scheduler={"max_num_seqs": 12, "max_num_batched_tokens": 64},
        kv={"block_size": 16, "num_blocks": 30},
    )


def assert_all_is_answered(
    reference: Reference, traffic: list[Arrival], answers: list[Answer]
) -> None:
    aborted = {arrival.aborts for arrival in traffic}
    for index, (arrival, answer) in enumerate(zip(traffic, answers, strict=True)):
        if index not in aborted:
            assert answer.ended.wait(ANSWER_S)
            assert len(answer.tokens) == arrival.count
        assert answer.tokens == reference.tokens[arrival.prompt][: len(answer.tokens)]


@pytest.mark.parametrize(
    ("architecture", "mode"),
    [
        slow("Qwen3ForCausalLM", "FULL"),
        slow("DeepseekV2ForCausalLM", "PIECEWISE"),
        ("Qwen3MoeForCausalLM", "FULL_AND_PIECEWISE"),
        rare("Qwen3ForCausalLM", "PIECEWISE"),
        rare("Qwen3ForCausalLM", "FULL_AND_PIECEWISE"),
        rare("Qwen3ForCausalLM", "FULL_DECODE_ONLY"),
        rare("Qwen3MoeForCausalLM", "FULL"),
        slow("DeepseekV3ForCausalLM", "FULL_AND_PIECEWISE"),
        rare("MiniMaxM2ForCausalLM", "PIECEWISE"),
        slow("GptOssForCausalLM", "FULL"),
    ],
)
def test_two_ranks_in_every_mode_under_arrivals_aborts_and_preemptions(
    references: Any, architecture: str, mode: str
) -> None:
    reference = references(architecture)
    traffic, answers = make_traffic(reference, len(mode)), []

    with lockstep(make_narrow_config(reference, mode)) as group:
        for index, arrival in enumerate(traffic):
            prompt, params = reference.prompts[arrival.prompt], greedy_params(arrival.count)
            answers.append(group.submit(str(index), prompt, params))
            for _ in range(arrival.steps):
                aborts = arrival.aborts
                group.turn(lambda aborts=aborts: aborts is None or group.abort(str(aborts)))
        group.finish()
        report, num_preemptions = group.report(), group.scheduler.num_preemptions

    assert_all_is_answered(reference, traffic, answers)
    assert num_preemptions > 0
    assert sum(bucket["replays"] for bucket in report["buckets"]) > 0
    if mode == "FULL":
        assert report["eager_steps"] == {}


@deployed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "mode"),
    [("Qwen3ForCausalLM", "FULL"), ("DeepseekV3ForCausalLM", "FULL_AND_PIECEWISE")],
)
def test_a_deployment_of_two_ranks_under_arrivals_aborts_and_preemptions(
    references: Any, architecture: str, mode: str
) -> None:
    reference = references(architecture)
    traffic, answers = make_traffic(reference, len(mode)), []

    with serving(make_narrow_config(reference, mode)) as service:
        for index, arrival in enumerate(traffic):
            prompt, params = reference.prompts[arrival.prompt], greedy_params(arrival.count)
            answers.append(service.submit(str(index), prompt, params))
            if arrival.aborts is not None:
                service.client.abort(str(arrival.aborts))
            time.sleep(0.005 * arrival.steps)
        assert_all_is_answered(reference, traffic, answers)
        report = service.report()

    assert report["metrics"]["num_preemptions"] > 0
    assert sum(bucket["replays"] for bucket in report["buckets"]) > 0
    if mode == "FULL":
        assert report["eager_steps"] == {}
