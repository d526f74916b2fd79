"""If memory of a device fails while many requests run, its contents are computed again, and no
request is lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.actors.leftovers import assert_all_npus_are_free, assert_processes_are_gone, wait_until
from tests.actors.recovery.test_faults_while_serving import worker_pids
from tests.checkpoints import make_prompts
from tests.deployments import Serving, greedy_params, make_deployment_config, serving, tokens_of

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

STREAMS, TOKENS, ANSWER_S = 12, 200, 240.0
# The faults hit three kinds of memory: a layer's keys in the first KV block, a weight, and HCCL's
# memory.
KV = "fault_op=aclnnFusedInferAttentionScoreV3 fault_operand=1 fault_offset=65536"
WEIGHT = "fault_op=aclnnMm fault_operand=1"
LIBRARY = "fault_op=HcclAllReduce"


def make_config(checkpoint: Path, arms: Path) -> Any:
    return make_deployment_config(
        checkpoint,
        parallel={"tp": 2},
        kv={"num_blocks": 1 + 2 * STREAMS, "block_size": 128},  # the streams need all blocks
        device={"emulator": {"strict": False, "fault": {"file": str(arms)}}},
        recovery={"resume_s": 20.0},
    )


def run_all(service: Serving, prefix: str, strike: Any = lambda: None) -> list[list[int]]:
    """Run all streams, call ``strike`` while they run, and return the tokens."""
    answers = [
        service.submit(f"{prefix}{index}", prompt, greedy_params(TOKENS))
        for index, prompt in enumerate(make_prompts([20] * STREAMS))
    ]
    wait_until(lambda: all(len(answer.tokens) > 5 for answer in answers), "none runs")
    strike()
    return tokens_of(ANSWER_S, answers)


@pytest.mark.slow
def test_the_contents_of_faulty_memory_decide_what_is_computed_again(
    checkpoint: Path, tmp_path: Path
) -> None:
    arms = tmp_path / "arms"

    def turn_bad(where: str) -> None:
        draft = arms.with_suffix(".draft")
        draft.write_text(f"{where} fault_kind=uce fault_rank=1")
        draft.rename(arms)
        wait_until(lambda: not arms.exists(), "the fault has struck nobody")

    with serving(make_config(checkpoint, arms)) as service:
        wanted, before = run_all(service, "sound"), worker_pids(service)

        assert run_all(service, "kv", lambda: turn_bad(KV)) == wanted
        [metrics] = service.client.query("metrics").values()
        assert metrics["resumptions"] == {"uce_kv": 1}
        assert metrics["num_preemptions"] == STREAMS
        assert (service.client.num_resumed, worker_pids(service)) == (0, before)

        # The group is lost. All of its processes join a new group. The process with the faulty
        # weight loads its weights again.
        assert run_all(service, "weight", lambda: turn_bad(WEIGHT)) == wanted
        assert service.client.num_resumed == STREAMS
        assert worker_pids(service) == before
        assert run_all(service, "again") == wanted
    assert_processes_are_gone(before)
    assert_all_npus_are_free()


@pytest.mark.slow
def test_the_process_whose_library_lost_memory_is_replaced(
    checkpoint: Path, tmp_path: Path
) -> None:
    arms = tmp_path / "arms"
    with serving(make_config(checkpoint, arms)) as service:
        wanted, before = run_all(service, "sound"), worker_pids(service)

        def strike() -> None:
            draft = arms.with_suffix(".draft")
            draft.write_text(f"{LIBRARY} fault_kind=uce fault_rank=1")
            draft.rename(arms)

        assert run_all(service, "struck", strike) == wanted
        after = worker_pids(service)
        assert before[0] == after[0] and before[1] != after[1]
    assert_processes_are_gone([*before, *after])
    assert_all_npus_are_free()
