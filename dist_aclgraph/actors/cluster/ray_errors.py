"""Converts errors of Ray and Ray Serve to our errors. A message is one sentence with a remedy.

The command line, the ingress and the class LLM use this module, because they show errors to users.
"""

from __future__ import annotations

import re

from ray._common.utils import get_default_ray_temp_dir
from ray._private import worker as ray_worker
from ray.exceptions import (
    ActorUnavailableError,
    AuthenticationError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    TaskUnschedulableError,
    WorkerCrashedError,
)

from dist_aclgraph.errors import (
    DeviceError,
    DistAclGraphError,
    EngineUnavailableError,
    GraphError,
    PlacementError,
    WorkerLostError,
)

MAX_CHARS = 500
# Lines of Ray's messages that ``sentence`` omits: stack frames of C++ and Ray, lines with the
# actor's id, and lines around a traceback.
NOISE = re.compile(
    r"^(frame #|\[ERROR\]|ray::|Traceback|File \"|class_name:|actor_id:|pid:|name:|namespace:|ip:"
    r"|Worker exit|The actor (died|is dead)|\x1b)"
)


def ours(error: BaseException, doing: str) -> DistAclGraphError:
    """Convert an error of Ray to the error that the user should see.

    Args:
        doing: the action that failed, e.g. "starting Ray".
    """
    if isinstance(error, DistAclGraphError):
        return error
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return ours(error.cause, doing)
    if isinstance(error, AuthenticationError):
        return PlacementError(
            f"{doing}: the cluster wants a token: set RAY_AUTH_MODE=token, and put the cluster's "
            "token into ~/.ray/auth_token, or name its file in RAY_AUTH_TOKEN_PATH"
        )
    if isinstance(error, ConnectionError):
        return PlacementError(
            f"{doing}: no Ray cluster answers there; start one with `ray start --head`, or unset "
            "RAY_ADDRESS to have one started here"
        )
    if isinstance(error, GetTimeoutError | TimeoutError):
        return EngineUnavailableError(
            f"{doing}: no answer in time; the machine may be overloaded: try again"
        )
    if isinstance(error, TaskUnschedulableError):
        return PlacementError(f"{doing}: no node of the Ray cluster has room: {sentence(error)}")
    if isinstance(error, RayActorError | WorkerCrashedError | OutOfMemoryError):
        return EngineUnavailableError(f"{doing}: {death_of(error)}")
    return EngineUnavailableError(f"{doing}: {sentence(error)}")


def of_worker(error: BaseException, rank: int, phase: str) -> DistAclGraphError:
    """Convert an error of a call to an actor. ``rank`` is the worker's rank, or -1 if the actor is
    no worker.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    if rank >= 0 and isinstance(cause, DeviceError | GraphError):
        # The message of a device error does not name the rank, so the rank is added here.
        return type(cause)(f"rank {rank} in {phase}: {cause}")
    if isinstance(cause, DistAclGraphError):
        return cause
    if isinstance(cause, RayActorError | OutOfMemoryError):
        return WorkerLostError(death_of(cause), rank, phase)
    return WorkerLostError(f"{type(cause).__name__}: {sentence(cause)}", rank, phase)


def death_of(error: BaseException) -> str:
    """Return the cause that Ray reports for a process's death, and the folder of Ray's logs."""
    text = str(error)
    pid = re.search(r"\bpid: (\d+)", text)
    who = f"the process {pid[1]} died" if pid else "the process died"
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        return (
            f"{who}: Ray ended it because this node's memory was used up; free some, or start Ray "
            "with RAY_memory_monitor_refresh_ms=0"
        )
    if isinstance(error, ActorUnavailableError):
        return f"{who}, or it cannot be reached; look at Ray's logs in {ray_logs()}"
    if "owner has died" in text:
        return f"{who}: the controller that had started it is gone"
    if "__init__" in text or "creation task" in text:
        return f"{who} while it started: {sentence(error)}"
    node = re.search(r"\bip: (\S+)", text)
    where = f"{ray_logs()}{f' on node {node[1]}' if node else ''}"
    return f"{who}: it was killed or has crashed; its last words may be in {where}"


def ray_logs() -> str:
    """Return the folder of Ray's logs. This folder usually has the same path on all nodes.

    A process that is not connected to Ray gets the folder of the newest Ray on this machine.
    """
    node = ray_worker._global_node
    newest = f"{get_default_ray_temp_dir()}/session_latest"
    return f"{newest if node is None else node.get_session_dir_path()}/logs"


def sentence(error: BaseException) -> str:
    """Return the first three meaningful lines of the error's text as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not NOISE.match(line)]
    return " ".join(said[:3])[:MAX_CHARS] or type(error).__name__
