"""What a user sees of Ray's errors: one sentence, with a remedy where there is one."""

from __future__ import annotations

import pytest
from ray.exceptions import (
    ActorDiedError,
    AuthenticationError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)
from ray.serve.exceptions import RayServeException

from dist_aclgraph.actors.ray_errors import of_worker, ours
from dist_aclgraph.errors import (
    CaptureError,
    ConfigError,
    DistAclGraphError,
    EngineUnavailableError,
    PlacementError,
    WorkerLostError,
)

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: Worker
\tactor_id: 91e9ba69fb9af1b5d660640101000000
\tpid: 20742
\tnamespace: 712ec28a-e8e6-4dc7-b756-080c2d1e16e9
\tip: 127.0.0.1
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes \
include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop"""
INTERNALS = ("class_name", "actor_id", "namespace", "SYSTEM_ERROR", "Traceback", "ray::", "\n")


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("start", "Traceback (most recent call last):\n  ray::start()\n", cause)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (RayActorError(error_msg=DIED), EngineUnavailableError, "20742 died: it was killed"),
        (ActorDiedError(), EngineUnavailableError, "the process died"),
        (OutOfMemoryError("Task was killed due to the node running low on memory.\nIP: 1"),
         EngineUnavailableError, "RAY_memory_monitor_refresh_ms=0"),
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


def test_a_workers_death_names_its_rank_and_process() -> None:
    found = of_worker(RayActorError(error_msg=DIED), 3, "SERVING")

    assert isinstance(found, WorkerLostError)
    assert str(found).startswith("rank 3 in SERVING: the process 20742 died")
    assert not any(word in str(found) for word in INTERNALS), found


def test_a_workers_own_error_stays_what_it_is_and_gets_its_rank() -> None:
    found = of_worker(task_error(CaptureError("no stream")), 1, "CAPTURING")

    assert type(found) is CaptureError
    assert str(found) == "rank 1 in CAPTURING: no stream"
