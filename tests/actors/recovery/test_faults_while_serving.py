"""If a worker dies, fails or stalls while requests run, clients get an error that names the
worker's rank.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.actors.host import processes
from dist_aclgraph.errors import EngineDeadError
from tests.actors.leftovers import (
    assert_all_npus_are_free,
    assert_processes_are_gone,
    wait_until,
)
from tests.checkpoints import make_prompts
from tests.deployments import (
    ANSWER_S,
    Answer,
    Serving,
    greedy_params,
    make_deployment_config,
    serving,
)
from tests.slow import rare, slow

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

# Each request has enough tokens to run for more than a second, because the test may stall for a
# second before the kill. If one group has ended its requests before another group has begun, the
# test sends all requests again.
LONG, TRIES = 900, 10
# A failed group is neither resumed nor replaced, so requests end when no group is left.
NO_RECOVERY = {"restarts_per_hour": 0, "resume_s": 0}


@dataclass
class Busy:
    """A deployment with running requests, and its processes.

    Attributes:
        pids: process ids of the workers, by rank.
    """

    service: Serving
    pids: list[int]
    answers: list[Answer]

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)

    def sibling(self, name: str) -> int:
        """Return the process id of the only actor of class ``name``. This actor has the same parent
        process as the workers.
        """
        parent = int(Path(f"/proc/{self.pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
        # The kernel stores only the first 15 characters of a process name.
        [pid] = [p for p in processes.children(parent) if processes.name_of(p) == name[:15]]
        return pid


def submit_some(service: Serving, count: int = 4) -> list[Answer]:
    prompts = make_prompts([20] * count)
    return [service.submit(f"r{i}", p, greedy_params(LONG)) for i, p in enumerate(prompts)]


@contextmanager
def busy(checkpoint: Path, num_requests: int = 4, **overrides: Any) -> Iterator[Busy]:
    """Within this context, requests run, and each has at least one token. Afterwards, check that
    all NPUs are free.
    """
    overrides = {"recovery": NO_RECOVERY, **overrides}
    with serving(make_deployment_config(checkpoint, **overrides)) as service:
        pids = worker_pids(service)
        for _ in range(TRIES):
            answers = submit_some(service, num_requests)
            assert all(answer.began.wait(ANSWER_S) for answer in answers)
            if not any(answer.ended.is_set() for answer in answers):
                break
            assert all(answer.ended.wait(ANSWER_S) for answer in answers)
        yield Busy(service, pids, answers)
    assert_all_npus_are_free()


def worker_pids(service: Serving) -> list[int]:
    report = service.report()
    return [rank["pid"] for group in (report, *report["groups"]) for rank in group["ranks"]]


def is_dead(service: Serving) -> bool:
    try:
        service.client.raise_if_dead()
    except EngineDeadError:
        return True
    return False


def make_faulty_config(checkpoint: Path, **fault: Any) -> Any:
    return make_deployment_config(
        checkpoint,
        parallel={"tp": 2},
        graph={"mode": "NONE"},
        recovery=NO_RECOVERY,
        device={"emulator": {"strict": False, "fault": {"op": "aclnnSwiGlu", **fault}}},
        timeouts={"step_s": 4.0, "stop_s": 2.0},
    )


@pytest.mark.slow
def test_a_killed_worker_ends_requests_with_its_rank_and_leaves_no_process(
    checkpoint: Path,
) -> None:
    with busy(checkpoint, parallel={"tp": 2}) as run:
        run.kill(1)

        for answer in run.answers:
            assert answer.ended.wait(ANSWER_S)
            assert (answer.finish_reason, answer.error_kind) == ("error", "EngineDeadError")
            assert "rank 1" in answer.error
        wait_until(lambda: is_dead(run.service), "the client does not know")
        wait_until(lambda: not serves(run.service), "the controller does not know")
        with pytest.raises(EngineDeadError, match="rank 1"):
            run.service.deployment.raise_if_dead()
        # A request that is sent after the worker's death fails at once. Its error names the cause.
        with pytest.raises(EngineDeadError, match="rank 1"):
            submit_some(run.service, 1)
        assert_processes_are_gone(run.pids)


@pytest.mark.slow
def test_a_failing_operator_ends_requests_with_its_rank(checkpoint: Path) -> None:
    with serving(make_faulty_config(checkpoint, call=30, rank=1)) as service:
        pids = worker_pids(service)

        answers = submit_some(service)

        for answer in answers:
            assert answer.ended.wait(ANSWER_S)
            assert "aclnnSwiGlu" in answer.error or "507015" in answer.error
            assert "rank 1" in answer.error
    assert_processes_are_gone(pids)
    assert_all_npus_are_free()


@pytest.mark.slow
def test_a_stalled_worker_ends_requests_in_bounded_time(checkpoint: Path) -> None:
    config = make_faulty_config(checkpoint, call=30, rank=1, kind="stall", stall_s=60.0)
    with serving(config) as service:
        pids = worker_pids(service)

        answers = submit_some(service)

        for answer in answers:
            assert answer.ended.wait(ANSWER_S)
            assert "was not answered by rank 0, 1" in answer.error
    assert_processes_are_gone(pids)
    assert_all_npus_are_free()


@pytest.mark.parametrize("step_s", [slow(4.0), rare(600.0)])
def test_a_stopped_rank_is_blamed_and_not_its_peers(checkpoint: Path, step_s: float) -> None:
    """Depending on ``step_s``, the first error comes from the step's time limit or from the missing
    heartbeats.
    """
    with busy(
        checkpoint,
        parallel={"tp": 2},
        graph={"mode": "NONE"},
        timeouts={"step_s": step_s, "stop_s": 2.0, "link_s": 5.0},
    ) as run:
        os.kill(run.pids[0], signal.SIGSTOP)

        for answer in run.answers:
            assert answer.ended.wait(ANSWER_S)
            assert answer.error.startswith("rank 0 in SERVING"), answer.error
        wait_until(lambda: is_dead(run.service), "the client does not know")
        assert_processes_are_gone(run.pids)


@pytest.mark.slow
def test_the_death_of_a_group_loses_no_request_and_harms_no_other_group(checkpoint: Path) -> None:
    with busy(checkpoint, 6, parallel={"dp": 2}, timeouts={"link_s": 60.0}) as run:
        service = run.service

        run.kill(1)

        for answer in run.answers:
            assert answer.ended.wait(ANSWER_S)
            assert not answer.error
        assert service.client.num_resumed == 3
        service.generate(make_prompts([20] * 3), greedy_params(10), "again")
        service.client.raise_if_dead()
        service.deployment.raise_if_dead()
        [loss] = service.client.capacity().lost.values()
        assert "rank 1" in loss
        wait_until(lambda: bool(service.report()["lost_groups"]), "the controller does not know")
        [loss] = service.report()["lost_groups"]
        assert loss.startswith("the group of ranks 1: rank 1 in SERVING")

        run.kill(0)

        wait_until(lambda: is_dead(service), "the client does not know")
        with pytest.raises(EngineDeadError, match=r"rank 0.*rank 1"):
            service.deployment.raise_if_dead()
        with pytest.raises(EngineDeadError, match="rank 0"):
            submit_some(service, 1)
        assert_processes_are_gone(run.pids)


@pytest.mark.slow
def test_a_killed_engine_ends_its_requests_and_leaves_nothing(checkpoint: Path) -> None:
    with busy(checkpoint, timeouts={"link_s": 60.0}) as run:
        engine = run.sibling("ray::Engine")

        os.kill(engine, signal.SIGKILL)

        for answer in run.answers:
            assert answer.ended.wait(ANSWER_S)
            assert "its process is gone" in answer.error
        wait_until(lambda: not serves(run.service), "the controller does not know")
        assert_processes_are_gone([engine, *run.pids])


@pytest.mark.slow
def test_a_killed_controller_takes_everything_with_it(checkpoint: Path) -> None:
    with busy(checkpoint, recovery={"restarts_per_hour": 0}) as run:
        engine, controller = run.sibling("ray::Engine"), run.sibling("ray::Controller")

        os.kill(controller, signal.SIGKILL)

        for answer in run.answers:
            assert answer.ended.wait(ANSWER_S)
        wait_until(lambda: not serves(run.service), "nobody knows of its death")
        with pytest.raises(EngineDeadError, match="the controller has died; it is not started"):
            run.service.deployment.raise_if_dead()
        assert_processes_are_gone([engine, *run.pids])


def serves(service: Serving) -> bool:
    try:
        service.deployment.raise_if_dead()
    except EngineDeadError:
        return False
    return True


@pytest.mark.slow
def test_reports_disturb_nothing_and_shutting_down_in_the_middle_ends_requests(
    checkpoint: Path,
) -> None:
    with busy(checkpoint, 8, parallel={"tp": 2}) as run:
        service = run.service
        while not all(answer.ended.is_set() for answer in run.answers):
            assert service.report()["state"] == "SERVING"
            assert service.client.query("metrics")["0"]["num_requests_running"] <= 8
        assert {answer.finish_reason for answer in run.answers} == {"length"}

        answers = [
            service.submit(f"later{i}", prompt, greedy_params(LONG))
            for i, prompt in enumerate(make_prompts([20] * 4))
        ]
        assert all(answer.began.wait(ANSWER_S) for answer in answers)
        service.deployment.shut_down()

        assert_processes_are_gone(run.pids)
        service.client.close()
        assert all(answer.ended.wait(ANSWER_S) for answer in answers)
