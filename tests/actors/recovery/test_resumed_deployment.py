"""If a link between devices fails while many requests run, the group pauses and continues, or is
replaced.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.actors.leftovers import (
    assert_all_npus_are_free,
    assert_processes_are_gone,
    wait_until,
)
from tests.actors.recovery.test_faults_while_serving import worker_pids
from tests.checkpoints import make_prompts
from tests.deployments import (
    Answer,
    Serving,
    greedy_params,
    make_deployment_config,
    serving,
    tokens_of,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

STREAMS, TOKENS, ANSWER_S = 64, 60, 240.0


def make_config(checkpoint: Path, arms: Path, **second: Any) -> Any:
    faults = {"fault": {"file": str(arms)}, "second_fault": second}
    return make_deployment_config(
        checkpoint,
        parallel={"tp": 2},
        scheduler={"max_num_seqs": STREAMS},
        kv={"num_blocks": 1 + STREAMS, "block_size": 128},  # one block per stream
        device={"emulator": {"strict": False, **faults}},
        timeouts={"step_s": 60.0, "stop_s": 2.0},
        recovery={"resume_s": 20.0},
    )


def submit_all(service: Serving, prefix: str) -> list[Answer]:
    prompts = make_prompts([20] * STREAMS)
    return [
        service.submit(f"{prefix}{i}", prompt, greedy_params(TOKENS))
        for i, prompt in enumerate(prompts)
    ]


def strike(arms: Path, answers: list[Answer]) -> None:
    """Make a link fail while all streams run; return after it has failed."""
    assert all(answer.began.wait(ANSWER_S) for answer in answers)
    draft = arms.with_suffix(".draft")
    draft.write_text("fault_op=HcclAllReduce fault_kind=link")
    draft.rename(arms)
    wait_until(lambda: not arms.exists(), "the fault has struck nobody")


def metrics_of(service: Serving) -> dict[str, Any]:
    [metrics] = service.client.query("metrics").values()
    return metrics


@pytest.mark.slow
def test_many_streams_go_on_where_they_were(checkpoint: Path, tmp_path: Path) -> None:
    arms = tmp_path / "arms"
    with serving(make_config(checkpoint, arms)) as service:
        pids = worker_pids(service)
        expected = tokens_of(ANSWER_S, submit_all(service, "sound"))
        sound = metrics_of(service)

        answers = submit_all(service, "struck")
        strike(arms, answers)
        struck_s, seen = time.monotonic(), [len(answer.tokens) for answer in answers]
        wait_until(
            lambda: all(
                len(answer.tokens) > count or answer.ended.is_set()
                for answer, count in zip(answers, seen, strict=True)
            ),
            "no stream goes on",
        )
        print(f"every stream had a token {time.monotonic() - struck_s:.2f} s after the fault")

        assert tokens_of(ANSWER_S, answers) == expected
        metrics = metrics_of(service)
        assert metrics["resumptions"] == {"link": 1}
        assert service.client.num_resumed == 0
        for counted_once in ("prompt_tokens", "prefix_cache_queries", "generation_tokens"):
            assert metrics[counted_once] == 2 * sound[counted_once]
        assert worker_pids(service) == pids
    assert_processes_are_gone(pids)
    assert_all_npus_are_free()


@pytest.mark.slow
def test_a_rank_that_dies_while_the_group_comes_back_costs_the_group_and_no_request(
    checkpoint: Path, tmp_path: Path
) -> None:
    arms = tmp_path / "arms"
    config = make_config(checkpoint, arms, op="HcclCommResume", rank=0, kind="die")
    with serving(config) as service:
        expected = tokens_of(ANSWER_S, submit_all(service, "sound"))

        answers = submit_all(service, "struck")
        strike(arms, answers)

        assert tokens_of(ANSWER_S, answers) == expected
        assert service.client.num_resumed > 0
