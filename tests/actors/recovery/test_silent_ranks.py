"""If several ranks do not answer, the group blames the rank whose host code is stuck."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from dist_aclgraph.actors.worker import worker_group
from dist_aclgraph.actors.worker.worker_group import WorkerGroup
from dist_aclgraph.errors import WorkerStartTimeoutError
from tests.deployments import forked_actor
from tests.plans import decode_graph

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.usefixtures("ray_cluster"),
]

ASLEEP_S = 60.0


class SilentWorker:
    """A worker that carries out no command, but answers a ping with its status.

    Args:
        waits: whether the worker's status says that it waits for its device. If None, the worker
            does not answer pings in time.
    """

    def __init__(self, waits: bool | None) -> None:
        self._waits = waits

    @ray.method(concurrency_group="control")
    def ping(self) -> dict[str, Any]:
        if self._waits is None:
            time.sleep(ASLEEP_S)
        return {"doing": "capture full decode 4", "waits": self._waits}

    def carry_out(self, command: Any) -> None:
        time.sleep(ASLEEP_S)


@pytest.fixture
def make_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WorkerGroup]]:
    monkeypatch.setattr(worker_group, "ASK_S", 10.0)  # a busy machine needs seconds to answer
    actor = forked_actor(SilentWorker, concurrency_groups={"control": 1})
    started: list[Any] = []

    def make(*waits: bool | None) -> WorkerGroup:
        started.extend(actor.remote(each) for each in waits)
        nothing: Any = None
        group = WorkerGroup(tuple(range(4, 4 + len(waits))), list(started), nothing, nothing)
        ray.get(
            [w.ping.remote() for w, each in zip(started, waits, strict=True) if each is not None]
        )
        return group

    yield make
    for worker in started:
        ray.kill(worker)


def silence_of(group: WorkerGroup) -> WorkerStartTimeoutError:
    with pytest.raises(WorkerStartTimeoutError, match=r"within 0\.5 s") as caught:
        group.carry_out("capture", 0.5, decode_graph(4))
    return caught.value


def test_a_rank_stuck_on_its_host_is_blamed_before_those_that_wait(make_group: Any) -> None:
    error = silence_of(make_group(True, False, True))

    assert error.rank == 5
    assert "capture full decode 4 was not answered by rank 4, 5, 6" in str(error)
    assert "rank 4 waits for its device; rank 5 is stuck on its host" in str(error)


def test_a_rank_that_says_nothing_is_blamed_before_those_that_wait(make_group: Any) -> None:
    error = silence_of(make_group(True, None))

    assert error.rank == 5
    assert "rank 5 does not say where it stands" in str(error)


def test_no_rank_is_blamed_if_all_ranks_wait_for_their_devices(make_group: Any) -> None:
    error = silence_of(make_group(True, True))

    assert error.rank == -1
    assert "rank 4, 5" in str(error)
