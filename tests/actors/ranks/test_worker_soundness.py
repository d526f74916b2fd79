"""After some failures of the step loop, a worker's weights are still usable. After other failures,
the weights are not usable.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from dist_aclgraph.actors.worker import worker as module
from dist_aclgraph.actors.worker.rank_stages import RunningRank
from dist_aclgraph.actors.worker.worker import Worker
from dist_aclgraph.config import make_config
from dist_aclgraph.device.bad_memory import MemoryRange
from dist_aclgraph.errors import DeviceError, DeviceFault, EngineDeadError
from dist_aclgraph.steps.step import Pause, RankBatch, RankPlan, StepResult


class Channel:
    """A channel from which a worker receives one command to pause, and then the command to end the
    step loop.
    """

    def __init__(self, is_engine_dead: bool) -> None:
        self._messages: list[Any] = [Pause(1)]
        self._is_engine_dead = is_engine_dead

    def receive(self, epoch: int) -> Any:
        return self._messages.pop() if self._messages else None

    def send(self, result: Any) -> None:
        if self._is_engine_dead:
            raise EngineDeadError("the connection to the engine has failed")

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def make_worker(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Worker]:
    monkeypatch.setattr(module.gc, "freeze", lambda: None)
    monkeypatch.setattr(module.gc, "unfreeze", lambda: None)  # conftest.py has called freeze

    def make(
        error: Exception | None,
        fault: DeviceFault | None,
        *,
        is_engine_dead: bool = False,
        located: DeviceFault = "uce",
        bad_memory: tuple[MemoryRange, ...] = (),
        held: Sequence[list[MemoryRange]] = (),
    ) -> Worker:
        """Return a worker whose steps raise ``error``.

        Each query of the allocator's memory returns the next list in ``held``.
        """
        worker = Worker(make_config({"model": "unused"}), epoch=1)
        rank = Mock(spec=RunningRank, joined=Mock(group_rank=0), runner=Mock())
        rank.joined.groups.dp_rank = 0
        rank.joined.npu.fault_of.return_value = fault
        rank.joined.npu.bad_memory.return_value = bad_memory
        rank.joined.npu.tensor_memory.side_effect = held
        rank.locate.return_value = located
        rank.leave.return_value = Mock(joined=rank.joined)
        rank.joined.joined = rank.joined
        rank.joined.npu.launching = contextlib.nullcontext
        rank.runner.finish.side_effect = error
        worker._stage = rank
        monkeypatch.setattr(module, "StepReceiver", lambda address: Channel(is_engine_dead))
        return worker

    return make


def run(worker: Worker) -> None:
    with contextlib.suppress(DeviceError, EngineDeadError):
        worker.run_loop(Mock())


def leaves(worker: Worker) -> bool:
    try:
        worker.leave(1)
    except DeviceError as e:
        assert re.search("cannot (trust its memory|give back memory)", str(e))
        return False
    return True


@pytest.mark.parametrize(
    ("fault", "is_trusted"),
    [("stopped", True), ("operator", True), ("link", True), ("ecc", False), ("suspect", False)],
)
def test_a_known_fault_says_whether_weights_are_as_they_were(
    make_worker: Any, fault: DeviceFault, is_trusted: bool
) -> None:
    worker = make_worker(DeviceError("it failed"), fault, is_engine_dead=False)
    run(worker)

    assert leaves(worker) is is_trusted


@pytest.mark.parametrize("is_engine_dead", [False, True])
def test_other_groups_may_still_fetch_files_after_an_orderly_end(
    make_worker: Any, is_engine_dead: bool
) -> None:
    worker, files = make_worker(None, None, is_engine_dead=is_engine_dead), Mock()
    worker._node_files = files
    run(worker)

    calls = [name for name, *_ in files.method_calls]
    assert calls == ["wait_until_quiet", "close"][is_engine_dead:]


BAD, ELSEWHERE = MemoryRange(4096, 8192), MemoryRange(8192, 12288)


@pytest.mark.parametrize(
    ("located", "held", "is_trusted"),
    [
        ("uce_kv", [[ELSEWHERE]], True),
        ("uce_tensor", [[ELSEWHERE, BAD], [ELSEWHERE]], True),  # BAD belonged to the weights
        ("uce_tensor", [[BAD], [BAD]], False),
        ("uce", [], False),
    ],
)
def test_a_worker_survives_if_it_can_free_its_faulty_memory(
    make_worker: Any, located: DeviceFault, held: Any, is_trusted: bool
) -> None:
    worker = make_worker(
        DeviceError("UCE ERROR"), "uce", located=located, bad_memory=(BAD,), held=held
    )
    stage = worker._stage
    run(worker)

    assert leaves(worker) is is_trusted
    if is_trusted:
        has_weights = len(held) == 1
        assert worker._stage is (stage.leave.return_value if has_weights else stage.joined)


def test_an_error_that_nobody_knows_is_not_trusted(make_worker: Any) -> None:
    worker = make_worker(DeviceError("it failed"), None, is_engine_dead=False)
    run(worker)

    assert not leaves(worker)


def test_an_engine_that_is_gone_when_it_is_answered_says_nothing_of_the_device(
    make_worker: Any,
) -> None:
    worker = make_worker(None, None, is_engine_dead=True)
    run(worker)

    assert leaves(worker)


class Answered:
    """A channel from which a worker receives one step; it records all messages of the worker."""

    def __init__(self, plan: RankPlan) -> None:
        self._plans: list[RankPlan] = [plan]
        self.sent: list[Any] = []

    def receive(self, epoch: int) -> Any:
        return self._plans.pop() if self._plans else None

    def has_message(self) -> bool:
        return False

    def send(self, result: Any) -> None:
        self.sent.append(result)

    def close(self) -> None:
        """Nothing is open."""


def test_an_error_behind_the_last_answer_is_none_of_the_step_that_was_answered(
    make_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine ignores errors of steps that were answered. So an error after the last answer must
    name a later step.
    """
    worker = make_worker(None, "link")
    plan = RankPlan(1, 7, worker._plan.version, None, 0, RankBatch(b""))
    channel = Answered(plan)
    monkeypatch.setattr(module, "StepReceiver", lambda address: channel)
    runner = worker._stage.runner
    runner.launch = lambda step, rank, report: report(StepResult(1, step.step, rank))
    runner.prepare_next.side_effect = DeviceError("a link is gone")

    run(worker)

    answer, failure = channel.sent
    assert (answer.step, answer.error) == (plan.step, "")
    assert (failure.error, failure.fault) == ("a link is gone", "link")
    assert failure.step > plan.step


def test_a_worker_that_has_left_its_group_has_a_new_lease_for_the_next(make_worker: Any) -> None:
    worker = make_worker(None, None)
    run(worker)
    before = worker._lease

    assert leaves(worker)

    # The worker has given its old lease back, so only the new lease can end this process.
    assert before.is_given_back
    assert not worker._lease.is_given_back
