"""Workers of a lost group can join another group if their weights are usable. All other workers are
ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from dist_aclgraph.actors.controller.group_state import GroupState
from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup
from dist_aclgraph.actors.controller.survivors import gather_survivors
from dist_aclgraph.actors.host.processes import end_process
from dist_aclgraph.actors.worker.rank_facts import WorkerInfo
from dist_aclgraph.actors.worker.worker_group import WorkerGroup
from dist_aclgraph.errors import DeviceError, EngineDeadError
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.planning.way_back import SOUND_S
from tests.actors.leftovers import is_alive, wait_until
from tests.deployments import forked_actor, make_deployment_config
from tests.slow import slow

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


class LoopWorker:
    """A worker that answers as ``Worker`` does after the loss of its group.

    Args:
        fails: for the name of each method that fails, the error that it raises.
    """

    def __init__(self, fails: dict[str, Exception]) -> None:
        self._fails = fails

    def _answer(self, method: str) -> None:
        if method in self._fails:
            raise self._fails[method]

    @ray.method(concurrency_group="control")
    def ping(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="control")
    def stop_device(self, timeout_s: float) -> None:
        self._answer("stop_device")

    @ray.method(concurrency_group="control")
    def end_neighbour(self, pid: int, timeout_s: float) -> bool:
        try:
            handle = os.pidfd_open(pid)
        # The process has ended and was reaped. A real worker opens the handle of the process
        # earlier, while the process runs.
        except ProcessLookupError:
            return True
        return end_process(handle, timeout_s)

    @ray.method(concurrency_group="control")
    def dismiss(self) -> None:
        """Do nothing, because the loop has ended."""

    def run_loop(self) -> None:
        self._answer("run_loop")

    def leave(self, epoch: int) -> None:
        self._answer("leave")


MakeGroup = Callable[..., LockstepGroup]


@pytest.fixture
def make_group(checkpoint: Path) -> Iterator[MakeGroup]:
    actor = forked_actor(LoopWorker, concurrency_groups={"control": 1})
    started: list[Any] = []

    def make(*fails: dict[str, Exception]) -> LockstepGroup:
        tp = len(fails)
        config = make_deployment_config(checkpoint, parallel={"tp": tp}, timeouts={"link_s": 60.0})
        workers = [actor.remote(each) for each in fails]
        started.extend(workers)
        pids = ray.get([worker.ping.remote() for worker in workers], timeout=60)
        loops = [worker.run_loop.remote() for worker in workers]
        ray.wait(loops, num_returns=tp, timeout=60)
        nothing: Any = None
        infos = [WorkerInfo("here", "", "", pid, ()) for pid in pids]
        group = WorkerGroup(tuple(range(tp)), workers, nothing, nothing, infos, [0] * tp)
        return LockstepGroup(group, Planner.from_config(config), loops=loops, state=GroupState.LOST)

    yield make
    for worker in started:
        ray.kill(worker)


def lives(worker: Any) -> bool:
    try:
        ray.get(worker.ping.remote(), timeout=60)
    except RayError:
        return False
    return True


def kill(group: LockstepGroup, rank: int) -> None:
    """Kill a worker, and wait for its death. Ray kills the worker only after a delay. During this
    delay, the worker still answers calls.
    """
    ray.kill(group.workers.workers[rank])
    wait_until(lambda: not is_alive(group.workers.infos[rank].pid), "the worker lives")


DEAD_ENGINE = {"run_loop": EngineDeadError("the connection to the engine has ended")}


@pytest.mark.parametrize(
    "fails",
    [
        {"run_loop": ValueError("a bug")},
        slow({"stop_device": DeviceError("it does not stop")}),
        slow({"leave": DeviceError("rank 1 cannot trust its memory any more")}),
    ],
    ids=lambda fails: next(iter(fails)),
)
def test_a_worker_that_cannot_leave_its_group_in_order_is_ended(
    make_group: MakeGroup, fails: dict[str, Exception]
) -> None:
    group = make_group({}, fails)

    assert gather_survivors(group)

    assert group.lost_ranks == {1}
    assert [lives(worker) for worker in group.workers.workers] == [True, False]


def test_all_survive_the_death_of_their_engine(make_group: MakeGroup) -> None:
    group = make_group(DEAD_ENGINE, DEAD_ENGINE)

    assert gather_survivors(group)

    assert not group.lost_ranks


def test_a_dead_process_is_found_without_a_report(make_group: MakeGroup) -> None:
    group = make_group({}, {})
    kill(group, 0)

    assert gather_survivors(group)

    assert group.lost_ranks == {0}


def test_survivors_end_a_process_that_hangs(make_group: MakeGroup) -> None:
    group = make_group({}, {})
    stopped = group.workers.infos[1].pid
    group.lost_ranks.add(1)  # this rank does not answer
    os.kill(stopped, signal.SIGSTOP)

    assert gather_survivors(group)

    assert not is_alive(stopped)


def test_no_worker_survives_if_no_survivor_is_on_the_lost_ranks_node(
    make_group: MakeGroup,
) -> None:
    group = make_group({}, {})
    group.workers.infos[1] = replace(group.workers.infos[1], node_id="there")
    kill(group, 1)

    assert not gather_survivors(group)


@pytest.mark.slow
def test_without_survivors_or_soon_behind_the_last_time_the_group_is_built_anew(
    make_group: MakeGroup,
) -> None:
    leaves = {"leave": DeviceError("no")}
    assert not gather_survivors(make_group(leaves, leaves))

    group = make_group({}, {})
    group.is_rejoined, group.lost_s = True, SOUND_S / 2
    assert not gather_survivors(group)

    group = make_group({}, {})
    group.is_rejoined, group.lost_s = True, 2 * SOUND_S
    assert gather_survivors(group)
