"""What clients see when a worker dies, fails or stalls in the middle of their requests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.actors import processes
from dist_aclgraph.errors import EngineDeadError
from tests.actors.leftovers import (
    assert_all_npus_are_free,
    assert_processes_are_gone,
    wait_until,
)
from tests.checkpoints import make_prompts
from tests.deployments import Answer, Serving, greedy_params, make_deployment_config, serving

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

LONG = 400


def submit_some(service: Serving, count: int = 4) -> list[Answer]:
    prompts = make_prompts([20] * count)
    return [service.submit(f"r{i}", p, greedy_params(LONG)) for i, p in enumerate(prompts)]


def worker_pids(service: Serving) -> list[int]:
    return [rank["pid"] for rank in service.report()["ranks"]]


def is_dead(service: Serving) -> bool:
    try:
        service.client.check()
    except EngineDeadError:
        return True
    return False


def make_faulty_config(checkpoint: Path, **fault: Any) -> Any:
    return make_deployment_config(
        checkpoint,
        parallel={"tp": 2},
        graph={"mode": "NONE"},
        device={"emulator": {"strict": False, "fault": {"op": "aclnnSwiGlu", **fault}}},
        timeouts={"step_s": 4.0, "stop_s": 2.0},
    )


def test_a_killed_worker_ends_requests_with_its_rank_and_leaves_no_process(
    checkpoint: Path,
) -> None:
    config = make_deployment_config(checkpoint, parallel={"tp": 2})
    with serving(config) as service:
        pids = worker_pids(service)
        answers = submit_some(service)
        assert all(answer.began.wait(30) for answer in answers)

        os.kill(pids[1], signal.SIGKILL)

        for answer in answers:
            assert answer.ended.wait(20)
            assert (answer.finish_reason, answer.error_kind) == ("error", "EngineDeadError")
            assert "rank 1" in answer.error
        wait_until(lambda: is_dead(service), "the client does not know")
        with pytest.raises(EngineDeadError, match="rank 1"):
            service.deployment.check()
        assert_processes_are_gone(pids)
    assert_all_npus_are_free()


def test_a_request_after_a_death_ends_at_once_with_the_cause(checkpoint: Path) -> None:
    with serving(make_deployment_config(checkpoint)) as service:
        os.kill(worker_pids(service)[0], signal.SIGKILL)
        wait_until(lambda: is_dead(service), "the client does not know")

        with pytest.raises(EngineDeadError, match="rank 0"):
            submit_some(service, 1)


def test_a_failing_operator_ends_requests_with_its_rank(checkpoint: Path) -> None:
    with serving(make_faulty_config(checkpoint, call=30, rank=1)) as service:
        pids = worker_pids(service)

        answers = submit_some(service)

        for answer in answers:
            assert answer.ended.wait(20)
            assert "aclnnSwiGlu" in answer.error or "507015" in answer.error
            assert "rank 1" in answer.error
    assert_processes_are_gone(pids)
    assert_all_npus_are_free()


def test_a_stalled_worker_ends_requests_in_bounded_time(checkpoint: Path) -> None:
    config = make_faulty_config(checkpoint, call=30, rank=1, kind="stall", stall_s=60.0)
    with serving(config) as service:
        pids = worker_pids(service)

        answers = submit_some(service)

        for answer in answers:
            assert answer.ended.wait(20)
            assert "was not answered by rank 0, 1" in answer.error
    assert_processes_are_gone(pids)
    assert_all_npus_are_free()


@pytest.mark.parametrize("step_s", [4.0, 600.0])
def test_a_stopped_rank_is_blamed_and_not_its_peers(checkpoint: Path, step_s: float) -> None:
    """By the step's deadline, or by the heartbeat where that comes first."""
    config = make_deployment_config(
        checkpoint,
        parallel={"tp": 2},
        graph={"mode": "NONE"},
        timeouts={"step_s": step_s, "stop_s": 2.0, "link_s": 5.0},
    )
    with serving(config) as service:
        pids = worker_pids(service)
        answers = submit_some(service)
        assert all(answer.began.wait(30) for answer in answers)

        os.kill(pids[0], signal.SIGSTOP)

        for answer in answers:
            assert answer.ended.wait(60)
            assert answer.error.startswith("rank 0 in SERVING"), answer.error
        wait_until(lambda: is_dead(service), "the client does not know")
        assert_processes_are_gone(pids)


def test_the_death_of_a_group_is_its_own(checkpoint: Path) -> None:
    with serving(make_deployment_config(checkpoint, parallel={"dp": 2})) as service:
        report = service.report()
        pids = [group["ranks"][0]["pid"] for group in (report, *report["groups"])]
        answers = submit_some(service, 6)
        assert all(answer.began.wait(30) for answer in answers)

        os.kill(pids[1], signal.SIGKILL)

        for answer in answers:
            assert answer.ended.wait(30)
        lost = [answer for answer in answers if answer.error]
        assert len(lost) == 3
        assert all("rank 1 in SERVING" in answer.error for answer in lost)
        service.generate(make_prompts([20] * 3), greedy_params(10), "again")
        service.client.check()
        service.deployment.check()
        [loss] = service.client.losses()
        assert "rank 1" in loss
        wait_until(lambda: bool(service.report()["lost_groups"]), "the controller does not know")
        [loss] = service.report()["lost_groups"]
        assert loss.startswith("the group of ranks 1: rank 1 in SERVING")

        os.kill(pids[0], signal.SIGKILL)

        wait_until(lambda: is_dead(service), "the client does not know")
        with pytest.raises(EngineDeadError, match=r"rank 0.*rank 1"):
            service.deployment.check()
        assert_processes_are_gone(pids)
    assert_all_npus_are_free()


def test_a_killed_engine_ends_its_requests_and_leaves_nothing(checkpoint: Path) -> None:
    with serving(make_deployment_config(checkpoint, timeouts={"link_s": 60.0})) as service:
        pids = worker_pids(service)
        answers = submit_some(service)
        assert all(answer.began.wait(30) for answer in answers)
        [engine] = siblings_of(pids[0], "ray::Engine")

        os.kill(engine, signal.SIGKILL)

        for answer in answers:
            assert answer.ended.wait(20)
            assert "its process is gone" in answer.error
        wait_until(lambda: not serves(service), "the controller does not know")
        assert_processes_are_gone([engine, *pids])


def test_a_killed_controller_takes_everything_with_it(checkpoint: Path) -> None:
    with serving(make_deployment_config(checkpoint)) as service:
        pids = worker_pids(service)
        answers = submit_some(service)
        assert all(answer.began.wait(30) for answer in answers)
        [engine] = siblings_of(pids[0], "ray::Engine")
        [controller] = siblings_of(pids[0], "ray::Controller")

        os.kill(controller, signal.SIGKILL)

        for answer in answers:
            assert answer.ended.wait(20)
        with pytest.raises(EngineDeadError, match="the controller: the process"):
            service.deployment.check()
        assert_processes_are_gone([engine, *pids])
    assert_all_npus_are_free()


def siblings_of(pid: int, name: str) -> list[int]:
    """Actors of a class, which Ray has started beside the one with this process id."""
    status = Path(f"/proc/{pid}/status").read_text()
    parent = int(status.partition("PPid:")[2].split()[0])
    # The kernel keeps 15 characters of a name.
    return [p for p in processes.children(parent) if processes.name_of(p) == name[:15]]


def serves(service: Serving) -> bool:
    try:
        service.deployment.check()
    except EngineDeadError:
        return False
    return True


def test_shutting_down_in_the_middle_of_requests_ends_them(checkpoint: Path) -> None:
    with serving(make_deployment_config(checkpoint, parallel={"tp": 2})) as service:
        pids = worker_pids(service)
        answers = submit_some(service)
        assert all(answer.began.wait(30) for answer in answers)

        service.deployment.shut_down()

        assert_processes_are_gone(pids)
        service.client.close()
        assert all(answer.ended.wait(20) for answer in answers)
    assert_all_npus_are_free()


def test_reports_and_queries_from_other_threads_disturb_nothing(checkpoint: Path) -> None:
    with serving(make_deployment_config(checkpoint)) as service:
        answers = submit_some(service, 8)

        while not all(answer.ended.is_set() for answer in answers):
            assert service.report()["state"] == "SERVING"
            assert service.client.query("metrics")[0]["num_requests_running"] <= 8
            time.sleep(0.001)

        assert {answer.finish_reason for answer in answers} == {"length"}
