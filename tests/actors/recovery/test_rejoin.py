"""If a process of a group dies, the other workers keep their weights and join a new group."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.sampling import SamplingParams
from tests.actors.leftovers import assert_all_npus_are_free, assert_processes_are_gone, wait_until
from tests.actors.recovery.test_faults_while_serving import worker_pids
from tests.checkpoints import copy_of, make_prompts
from tests.deployments import Answer, Serving, make_deployment_config, serving, tokens_of
from tests.slow import slow

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

STREAMS, TOKENS, ANSWER_S = 8, 100, 240.0
SOFTWARE_QUEUES = {"strict": False, "accounting": "software_sq"}
PROMPTS = make_prompts([20, 7, 33, 12] * (STREAMS // 4))


def submit_all(service: Serving, prefix: str) -> list[Answer]:
    return [
        service.submit(
            f"{prefix}{index}",
            prompt,
            SamplingParams(
                max_tokens=TOKENS,
                ignore_eos=True,
                temperature=0.0 if index % 2 == 0 else 0.9,
                seed=index,
            ),
        )
        for index, prompt in enumerate(PROMPTS)
    ]


def strike(service: Serving, prefix: str, pid: int, number: int) -> list[list[int]]:
    """Run all streams; send signal ``number`` to the process ``pid`` while they run; return their
    tokens.
    """
    answers = submit_all(service, prefix)
    wait_until(lambda: all(len(answer.tokens) > 5 for answer in answers), "none runs")
    os.kill(pid, number)
    return tokens_of(ANSWER_S, answers)


def plan_of(service: Serving) -> Any:
    return service.report()["plan"]


@pytest.mark.parametrize(
    "keys",
    [
        {"parallel": {"tp": 2, "pcp": 2}},
        slow({"parallel": {"tp": 2}, "device": {"emulator": SOFTWARE_QUEUES}}),
    ],
    ids=["four ranks", "software queues"],
)
def test_survivors_of_a_killed_worker_go_on_with_all_streams(
    checkpoint: Path, keys: dict[str, Any]
) -> None:
    config = make_deployment_config(checkpoint, **keys)
    with serving(config) as service:
        wanted = tokens_of(ANSWER_S, submit_all(service, "sound"))
        before, plan = worker_pids(service), plan_of(service)

        found = strike(service, "struck", before[1], signal.SIGKILL)

        wait_until(lambda: worker_pids(service) != before, "no other group", ANSWER_S)
        after = worker_pids(service)
        assert found == wanted
        assert before[:1] + before[2:] == after[:1] + after[2:]
        assert before[1] != after[1]
        assert plan_of(service)["families"] == plan["families"]
        assert tokens_of(ANSWER_S, submit_all(service, "again")) == wanted
    assert_processes_are_gone([*before, *after])
    assert_all_npus_are_free()


@pytest.mark.slow
def test_all_workers_survive_their_engine_and_then_a_group_is_built_anew(checkpoint: Path) -> None:
    """If a group of survivors is lost soon after its start, none of its workers is used again."""
    config = make_deployment_config(checkpoint, parallel={"tp": 2})
    with serving(config) as service:
        wanted = tokens_of(ANSWER_S, submit_all(service, "sound"))
        workers, engine = worker_pids(service), service.report()["engine_pid"]

        found = strike(service, "struck", engine, signal.SIGKILL)

        assert found == wanted
        assert worker_pids(service) == workers

        found = strike(service, "again", workers[0], signal.SIGKILL)

        assert found == wanted
        assert not set(worker_pids(service)) & set(workers)
    assert_all_npus_are_free()


@pytest.mark.slow
def test_where_survivors_make_no_group_another_one_is_built(
    checkpoint: Path, tmp_path: Path
) -> None:
    """New workers fail, because the file of weights is missing. So no group can start, neither with
    survivors nor without survivors.
    """
    directory = copy_of(checkpoint, tmp_path)
    weights, away = directory / "model.safetensors", tmp_path / "away"
    config = make_deployment_config(directory, parallel={"tp": 2})
    with serving(config) as service:
        wanted = tokens_of(ANSWER_S, submit_all(service, "sound"))
        workers = worker_pids(service)
        weights.rename(away)
        answers = submit_all(service, "struck")
        wait_until(lambda: all(len(answer.tokens) > 5 for answer in answers), "none runs")
        os.kill(workers[0], signal.SIGKILL)
        wait_until(lambda: bool(service.report()["missing_groups"]["reason"]), "no trouble", 180)
        assert_processes_are_gone(workers)

        away.rename(weights)

        assert tokens_of(ANSWER_S, answers) == wanted
    assert_all_npus_are_free()
