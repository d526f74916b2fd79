"""Finds the survivors of a lost group. Survivors can join another group without loading weights
again.

A worker is a survivor if all of the following is true: its process answers; its step loop ended
gracefully or because the engine died; its device can be stopped and used again; the failure has not
damaged the memory of the device. All other workers are killed. ``gather_survivors`` returns True
only after the processes of the killed workers have ended.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from dist_aclgraph.actors.controller.group_state import GroupState
from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup
from dist_aclgraph.actors.controller.startup import EPOCH
from dist_aclgraph.actors.worker.worker_group import fetch, stop_devices
from dist_aclgraph.errors import DistAclGraphError, EngineDeadError
from dist_aclgraph.topology import GroupRank

END_S = 5.0  # seconds that a killed process may take to end

logger = logging.getLogger(__name__)


def gather_survivors(group: LockstepGroup) -> bool:
    """Let the surviving workers leave their group. Record the lost ranks in ``group.lost_ranks``.

    Returns:
        Whether survivors can join another group. True means that there are survivors, and that the
        NPUs of the lost ranks are free.
    """
    config = group.planner.config
    timeout_s = min(config.recovery.resume_s, config.timeouts.link_s)
    left = [GroupRank(i) for i in range(len(group.workers.ranks))]
    group.lost_ranks |= set(_failed(group, left))
    left = _without(left, group.lost_ranks)
    stopping = stop_devices([group.workers.workers[i] for i in left], timeout_s, lambda: None)
    group.lost_ranks |= {left[i] for i in stopping}
    left = _without(left, group.lost_ranks)
    group.lost_ranks |= set(_leave(group, left, timeout_s))
    group.lost_ranks |= set(_failed(group, _without(left, group.lost_ranks)))
    if group.way_back() != "REJOIN" or not _end(group, sorted(group.lost_ranks)):
        return False
    group.enter(GroupState.DETACHED)
    return True


def _without(ranks: Sequence[GroupRank], others: Collection[GroupRank]) -> list[GroupRank]:
    return [rank for rank in ranks if rank not in others]


def _failed(group: LockstepGroup, ranks: Sequence[GroupRank]) -> list[GroupRank]:
    """Return the members of ``ranks`` whose step loops have failed."""
    loops = {group.loops[rank]: rank for rank in ranks}
    over = ray.wait(list(loops), num_returns=len(loops), timeout=0)[0] if loops else []
    return [loops[loop] for loop in over if _has_failed(group, loops[loop], loop)]


def _has_failed(group: LockstepGroup, rank: GroupRank, done: Any) -> bool:
    """Return whether the ended call ``done`` of a worker raised an error. EngineDeadError does not
    count, because it means that only the engine has failed.
    """
    world_rank = group.workers.ranks[rank]
    try:
        fetch(done, world_rank, "SERVING")
    except EngineDeadError:
        return False
    except DistAclGraphError as e:
        logger.info("rank %d does not survive: %s", world_rank, e)
        return True
    return False


def _leave(group: LockstepGroup, ranks: Sequence[GroupRank], timeout_s: float) -> list[GroupRank]:
    """Let the workers of ``ranks`` leave their group. Return the ranks of the workers that did not
    leave in time.

    First, each worker is told to end its step loop. If the engine hangs, or the engine's node has
    died, the loop does not end by itself.
    """
    for rank in ranks:
        group.workers.workers[rank].dismiss.remote()
    leaving = {group.workers.workers[rank].leave.remote(EPOCH): rank for rank in ranks}
    done = ray.wait(list(leaving), num_returns=len(leaving), timeout=timeout_s)[0] if ranks else []
    return [
        rank for ref, rank in leaving.items() if ref not in done or _has_failed(group, rank, ref)
    ]


def _end(group: LockstepGroup, ranks: Sequence[GroupRank]) -> bool:
    """Kill the workers of ``ranks``. Return whether the processes of all these workers have ended.

    After ``ray.kill``, Ray counts the actor as dead at once, although the process may still run.
    Ray also notices the death of a node late. So Ray's answers do not show whether a process has
    ended. Instead, a survivor on the same node kills the process, and waits for the end of the
    process.
    """
    workers, infos = group.workers.workers, group.workers.infos
    ending = []
    for rank in ranks:
        ray.kill(workers[rank])
        node = infos[rank].node_id
        neighbours = [i for i, info in enumerate(infos) if info.node_id == node and i not in ranks]
        if not neighbours:
            return False
        ending.append(workers[neighbours[0]].end_neighbour.remote(infos[rank].pid, END_S))
    try:
        return all(ray.get(ending, timeout=2 * END_S))
    except RayError as e:
        logger.info("survivors could not end the other processes: %s", e)
        return False
