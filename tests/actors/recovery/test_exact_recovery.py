"""With exact continuations, a worker's death changes no token of a request, even in bfloat16."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dist_aclgraph.sampling import SamplingParams
from tests.actors.leftovers import assert_all_npus_are_free, wait_until
from tests.actors.recovery.test_faults_while_serving import worker_pids
from tests.checkpoints import make_prompts
from tests.deployments import Answer, Serving, make_deployment_config, serving, tokens_of

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

STREAMS, ROWS, TOKENS, ANSWER_S = 32, 16, 300, 240.0
PROMPTS = make_prompts([20, 7, 33, 12] * (STREAMS // 4))


def params_of(index: int) -> SamplingParams:
    """Return greedy parameters for even indices, and random sampling for odd indices.

    At every third index, the parameters contain a penalty.
    """
    return SamplingParams(
        max_tokens=TOKENS,
        ignore_eos=True,
        temperature=0.0 if index % 2 == 0 else 0.9,
        seed=index,
        frequency_penalty=0.5 if index % 3 == 0 else 0.0,
    )


def submit_all(service: Serving, prefix: str) -> list[Answer]:
    return [
        service.submit(f"{prefix}{index}", prompt, params_of(index))
        for index, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.slow
def test_all_streams_go_on_with_the_tokens_that_they_would_have_had(checkpoint: Path) -> None:
    config = make_deployment_config(
        checkpoint,
        dtype="bfloat16",
        parallel={"tp": 2},
        scheduler={"max_num_seqs": ROWS},
        kv={"num_blocks": 192, "block_size": 32},
        recovery={"exact": True, "restarts_per_hour": 1},
    )
    with serving(config) as service:
        wanted = tokens_of(ANSWER_S, submit_all(service, "sound"))
        report = service.report()
        assert list(report["plan"]["families"].values()) == [[ROWS]]
        assert report["eager_steps"] == {"prefill": STREAMS}  # each prompt takes one step

        answers = submit_all(service, "struck")
        wait_until(lambda: sum(len(answer.tokens) > 40 for answer in answers) >= ROWS, "none runs")
        os.kill(worker_pids(service)[1], signal.SIGKILL)

        found = tokens_of(ANSWER_S, answers)
        assert service.client.num_resumed >= ROWS
        assert [index for index in range(STREAMS) if found[index] != wanted[index]] == []
    assert_all_npus_are_free()
