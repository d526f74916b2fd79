"""While requests run, the group chooses new buckets twice. The plan gets three versions, and all
tokens stay the same.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.deployments import ANSWER_S, Serving, greedy_params, make_deployment_config, serving
from tests.laws import is_full
from tests.parity.conftest import LENGTHS, NUM_TOKENS, remember

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

NUM_STREAMS = 64
PHASE_S = 200.0  # seconds after which the plan must fit the new number of requests
# For each phase: the number of simultaneous requests, and a set of buckets. The plan must contain
# one of these buckets.
PHASES = ((20, {20, 24}), (44, {44, 48}), (NUM_STREAMS, {NUM_STREAMS}))


@pytest.fixture(scope="module")
def wide_references(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return references for wide models. In wide models, larger steps take measurably longer, even
    on a busy machine.
    """
    return remember(tmp_path_factory, LENGTHS, intermediate_size=4096)


def run_wave(service: Serving, reference: Any, name: str, size: int) -> None:
    """Run ``size`` requests at the same time, and check every token."""
    chosen = [i % len(reference.prompts) for i in range(size)]
    answers = [
        service.submit(f"{name}-{n}", reference.prompts[i], greedy_params(NUM_TOKENS))
        for n, i in enumerate(chosen)
    ]
    for i, answer in zip(chosen, answers, strict=True):
        assert answer.ended.wait(ANSWER_S), "no answer"
        assert answer.finish_reason == "length", answer.error
        assert answer.tokens == reference.tokens[i]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "parallel"),
    [
        ("Qwen3ForCausalLM", {"tp": 2}),
        pytest.param(
            "DeepseekV2ForCausalLM",
            {"pcp": 2, "dcp": 2},
            marks=pytest.mark.skipif(not is_full(), reason="with the full profile"),
        ),
    ],
)
def test_three_plan_versions_under_load_change_no_token(
    wide_references: Any, architecture: str, parallel: dict[str, int]
) -> None:
    reference = wide_references(architecture)
    config = make_deployment_config(
        reference.directory,
        parallel=parallel,
        scheduler={"max_num_seqs": NUM_STREAMS, "max_num_batched_tokens": 512},
        graph={
            "rebucket_s": 0.3,
            # On a busy machine, there are few steps per second, and measured times are inaccurate,
            # so a new plan may seem to save little time. With these settings, a new plan follows
            # after few steps, however small its gain is.
            "rebucket_min_steps": 8,
            "rebucket_gain": 0.001,
            "traffic_half_life_s": 30.0,
            "lazy": "off",
        },
        # torch_npu and HCCL occupy most of the 54 streams, so only a few buckets fit.
        device={"emulator": {"strict": False, "streams": 54}},
        kv={"block_size": 16, "num_blocks": 800},
    )
    versions, buckets = [1], []

    with serving(config) as service:
        # The number of simultaneous requests changes with each phase. A phase lasts until the plan
        # fits its number of requests.
        for phase, (size, fitting) in enumerate(PHASES):
            wave = 0
            deadline_s = time.monotonic() + PHASE_S
            while True:
                run_wave(service, reference, f"{phase}-{wave}", size)
                plan = service.report()["plan"]
                sizes = plan["families"]["full decode"]
                wave += 1
                if plan["version"] > versions[-1] and fitting.intersection(sizes):
                    break
                if phase == len(PHASES) - 1 or time.monotonic() > deadline_s:
                    break
            versions.append(plan["version"])
            buckets.append(sizes)
        report = service.report()

    assert versions[0] < versions[1] < versions[2]
    assert PHASES[0][1].intersection(buckets[0])
    assert all(sizes[-1] == NUM_STREAMS for sizes in buckets)
    assert report["rollbacks"] == []
    assert any("chosen again" in reason for reason in report["plan"]["reasons"])
