"""Users see each of Ray's errors as one sentence, with a remedy if there is one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import worker as ray_worker
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    AuthenticationError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)
from ray.serve.exceptions import RayServeException

from dist_aclgraph.actors.cluster.ray_errors import of_worker, ours, ray_logs
from dist_aclgraph.cli.doctor.cluster import silent_finding
from dist_aclgraph.errors import (
    CaptureError,
    ConfigError,
    DistAclGraphError,
    EngineUnavailableError,
    PlacementError,
    WorkerLostError,
)
from tests.deployments import forked_actor
from tests.slow import slow

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: Worker
\tactor_id: 91e9ba69fb9af1b5d660640101000000
\tpid: 20742
\tnamespace: 712ec28a-e8e6-4dc7-b756-080c2d1e16e9
\tip: 127.0.0.1
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes \
include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop"""
# In Ray 2.60, the message of the memory monitor stands between lines that identify the actor.
OUT_OF_MEMORY = DIED.split("The actor is dead")[0] + (
    "The actor is dead because its worker process has died. Worker exit type: NODE_OUT_OF_MEMORY "
    "Worker exit detail: 1 worker(s) were killed due to the node running low on memory. Memory on "
    "the node (IP: 10.0.0.1, ID: 5f) was 62.1GB used / 64.0GB limit (0.97)\nOOM kill reason: used"
)
INTERNALS = ("class_name", "actor_id", "namespace", "SYSTEM_ERROR", "Traceback", "ray::", "\n")


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("start", "Traceback (most recent call last):\n  ray::start()\n", cause)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (RayActorError(error_msg=DIED), EngineUnavailableError, "20742 died: it was killed"),
        (ActorDiedError(), EngineUnavailableError, "the process died"),
        (ActorUnavailableError("connection lost", None), EngineUnavailableError,
         "the process died, or it cannot be reached"),
        (OutOfMemoryError("Task was killed due to the node running low on memory.\nIP: 1"),
         EngineUnavailableError, "RAY_memory_monitor_refresh_ms=0"),
        (RayActorError(error_msg=OUT_OF_MEMORY), EngineUnavailableError,
         "the process 20742 died: Ray ended it because this node's memory was used up"),
        (RayActorError(error_msg=DIED + "\nbecause its owner has died"), EngineUnavailableError,
         "the controller that had started it is gone"),
        (AuthenticationError("InvalidAuthToken"), PlacementError, "~/.ray/auth_token"),
        (ConnectionError("Could not find any running Ray instance"), PlacementError, "ray start"),
        (GetTimeoutError("Get timed out"), EngineUnavailableError, "no answer in time"),
        (RayServeException("Prefix / is being used by application other."),
         EngineUnavailableError, "Prefix / is being used by application other"),
        (task_error(ConfigError("tp is 3; 1, 2 or 4")), ConfigError, "tp is 3; 1, 2 or 4"),
        (task_error(ValueError("ray::x()\nbad value")), EngineUnavailableError, "bad value"),
    ],
)  # fmt: skip
def test_an_error_of_ray_becomes_one_sentence_of_ours(
    error: Exception, kind: type[DistAclGraphError], said: str
) -> None:
    found = ours(error, "starting")

    assert type(found) is kind
    assert said in str(found)
    assert not any(word in str(found) for word in INTERNALS), found


def test_a_death_names_the_folder_of_rays_logs_and_the_node() -> None:
    found = str(ours(RayActorError(error_msg=DIED), "starting"))

    assert found.endswith(f"its last words may be in {ray_logs()} on node 127.0.0.1")


def test_without_a_connection_the_folder_of_rays_logs_is_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_worker, "_global_node", None)
    monkeypatch.setenv("RAY_TMPDIR", "/data/tmp")

    assert ray_logs() == "/data/tmp/ray/session_latest/logs"
    assert ray_logs() in silent_finding("node", "it has not answered").remedy


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_the_folder_of_rays_logs_is_that_of_this_session() -> None:
    assert "session_latest" not in ray_logs()
    assert list(Path(ray_logs()).glob("raylet*"))


def test_a_workers_death_names_its_rank_and_process() -> None:
    found = of_worker(RayActorError(error_msg=DIED), 3, "SERVING")

    assert isinstance(found, WorkerLostError)
    assert str(found).startswith("rank 3 in SERVING: the process 20742 died")
    assert not any(word in str(found) for word in INTERNALS), found


def test_a_workers_own_error_stays_what_it_is_and_gets_its_rank() -> None:
    found = of_worker(task_error(CaptureError("no stream")), 1, "CAPTURING")

    assert type(found) is CaptureError
    assert str(found) == "rank 1 in CAPTURING: no stream"


class Victim:
    def pid(self) -> int:
        return os.getpid()

    def wait(self) -> None:
        signal.pause()


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("asks_before", [slow(True), False])
def test_a_killed_process_is_not_blamed_on_memory(asks_before: bool) -> None:
    actor: Any = forked_actor(Victim).remote()
    pid = ray.get(actor.pid.remote())
    waiting = [actor.wait.remote()] if asks_before else []

    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RayActorError) as raised:
        ray.get([*waiting, actor.wait.remote()])

    for said in (str(ours(raised.value, "asking")), str(of_worker(raised.value, 3, "SERVING"))):
        assert f"the process {pid} died: it was killed or has crashed" in said
        assert "memory" not in said
        assert not any(word in said for word in INTERNALS), said
