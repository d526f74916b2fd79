"""KV blocks in files remain usable after the group that computed them has ended, and even after its
service has ended.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import Config, ParallelConfig
from dist_aclgraph.kv.tiers import host_root
from tests.actors.leftovers import wait_until
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

TOKENS, ANSWER_S, BLOCK = 40, 240.0, 16
PROMPTS = make_prompts([100, 65, 180, 33])
NUM_FULL = sum((len(prompt) - 1) // BLOCK for prompt in PROMPTS)
# Blocks of prompts and answers. The KV of an answer's last token is never computed.
NUM_SAVED = sum((len(prompt) + TOKENS - 1) // BLOCK for prompt in PROMPTS)


def configure(checkpoint: Path, folder: Path, **kv: Any) -> Config:
    kv = {"num_blocks": 128, "block_size": BLOCK, "host_path": str(folder), "host_gib": 0.1} | kv
    return make_deployment_config(checkpoint, parallel={"tp": 2}, kv=kv)


def submit_all(service: Serving, prefix: str) -> list[Answer]:
    return [
        service.submit(f"{prefix}{index}", prompt, greedy_params(TOKENS))
        for index, prompt in enumerate(PROMPTS)
    ]


def copied(service: Serving) -> dict[str, int]:
    blocks: dict[str, int] = service.report()["metrics"]["kv_copied_blocks"]
    return blocks


def check_that_a_router_waits_for_files(service: Serving) -> None:
    """Check that a request ends only when its prompt's blocks are in files, if a router asks for
    this.
    """
    before, answer = copied(service)["saved"], Answer()
    service.client.submit("routed", [7] * 90, greedy_params(1), [], answer.take, role="prefill")
    assert len(tokens_of(ANSWER_S, [answer])[0]) == 1
    assert copied(service)["saved"] == before + 90 // BLOCK


def test_a_group_computes_prompts_for_another_one(checkpoint: Path, tmp_path: Path) -> None:
    """After the prefill group is killed, the other group computes prompts itself."""
    kv = {"num_blocks": 128, "block_size": BLOCK, "host_path": str(tmp_path), "host_gib": 0.1}
    parallel = {"dp": 2, "prefill_groups": 1, "prefill_from_tokens": 64}
    config = make_deployment_config(
        checkpoint, parallel=parallel, kv=kv, recovery={"restarts_per_hour": 0}
    )
    with serving(config) as service:
        wait_until(lambda: service.client.capacity().prefill == 1, "no roles are known")
        # The client sends requests only to engines that have answered it.
        wait_until(lambda: len(service.client.query("metrics")) == 2, "an engine is silent")
        wanted = tokens_of(ANSWER_S, submit_all(service, "split"))
        counts = service.client.query("metrics")
        prefill, decode = counts["0"], counts["1"]
        long = [prompt for prompt in PROMPTS if len(prompt) >= 64]
        assert prefill["prompt_tokens"] == sum(map(len, long))
        assert prefill["generation_tokens"] == len(long)
        assert decode["generation_tokens"] == TOKENS * len(PROMPTS) - len(long)
        num_full = sum(len(prompt) // BLOCK for prompt in long)
        assert prefill["kv_copied_blocks"]["saved"] == num_full
        assert decode["kv_copied_blocks"]["loaded"] == num_full

        answers = submit_all(service, "struck")
        wait_until(lambda: all(len(answer.tokens) > 2 for answer in answers), "none runs")
        os.kill(worker_pids(service)[0], signal.SIGKILL)
        assert tokens_of(ANSWER_S, answers) == wanted
        wait_until(lambda: service.client.capacity().prefill == 0, "no loss")
        assert tokens_of(ANSWER_S, submit_all(service, "degraded")) == wanted


def test_blocks_outlive_a_killed_worker_and_then_the_service(
    checkpoint: Path, tmp_path: Path
) -> None:
    config = configure(checkpoint, tmp_path, disk=str(tmp_path / "disk"), disk_gib=0.1)
    with serving(config) as service:
        wanted = tokens_of(ANSWER_S, submit_all(service, "sound"))
        wait_until(lambda: copied(service).get("saved", 0) >= NUM_SAVED, "blocks are not saved")
        check_that_a_router_waits_for_files(service)
        before = worker_pids(service)
        answers = submit_all(service, "struck")
        wait_until(lambda: all(len(answer.tokens) > 2 for answer in answers), "none runs")
        os.kill(before[1], signal.SIGKILL)
        assert tokens_of(ANSWER_S, answers) == wanted
        wait_until(lambda: worker_pids(service) != before, "no other group", ANSWER_S)
        # All answers may have ended before the worker was killed, so the prompts are sent once
        # more.
        assert tokens_of(ANSWER_S, submit_all(service, "again")) == wanted
        assert copied(service)["loaded"] >= NUM_FULL
        assert copied(service)["missed"] == 0
        assert host_root(config).exists()
    assert not any(path.is_dir() for path in host_root(config).iterdir())

    # A group with another number of ranks divides the heads in another way, but reads the same
    # files.
    with serving(config.model_copy(update={"parallel": ParallelConfig(tp=1)})) as service:
        assert tokens_of(ANSWER_S, submit_all(service, "later")) == wanted
        assert copied(service)["loaded"] >= NUM_FULL
