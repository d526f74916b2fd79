from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq

from dist_aclgraph.actors.wire.addresses import Place
from dist_aclgraph.actors.wire.step_channel import StepReceiver, StepSender
from dist_aclgraph.arrays.ints import pack_ints, unpack_ints
from dist_aclgraph.errors import (
    DeviceFaultError,
    EngineDeadError,
    WorkerLostError,
    WorkerStartTimeoutError,
)
from dist_aclgraph.steps.copies import CopiedBlocks
from dist_aclgraph.steps.step import (
    RankBatch,
    RankPlan,
    Resume,
    Resumed,
    RowSampling,
    RowStart,
    Shutdown,
    StepPlan,
    StepResult,
    StepSize,
    encoder,
)
from tests.actors.leftovers import wait_until
from tests.actors.strangers import NUM_JUNK

WAIT_S = 180.0
EPOCH = 3
NODE, HOST = "node", "127.0.0.1"

Serve = Callable[[StepReceiver, int], None]


def make_plan(step: int = 1, epoch: int = EPOCH, num_batches: int = 1) -> StepPlan:
    """Return a plan in which data-parallel rank i begins a prompt. The prompt has one token, i."""
    starts = [
        RowStart(0, pack_ints([i]), pack_ints([1]), RowSampling(seed=9)) for i in range(num_batches)
    ]
    batches = [RankBatch(pack_ints([0, 0, 1, 1]), started=(start,)) for start in starts]
    return StepPlan(epoch, step, 1, None, tuple(batches), largest=StepSize(1, 1))


class Channel:
    """A sender of steps, and receivers. Each receiver runs ``serve`` on its own thread until the
    sender closes.
    """

    def __init__(
        self, place: Place, num_workers: int, serve: Serve, ranks_per_batch: int | None = None
    ) -> None:
        self.sender = StepSender(
            range(4, 4 + num_workers), place, ranks_per_batch=ranks_per_batch or num_workers
        )
        # If other nodes can reach the sender, the receivers connect as workers of another node.
        self.node_id = NODE if place.host is None else "other node"
        self.threads = [
            threading.Thread(target=self._work, args=(rank, serve), daemon=True)
            for rank in range(num_workers)
        ]
        for thread in self.threads:
            thread.start()

    def _work(self, rank: int, serve: Serve) -> None:
        receiver = StepReceiver(self.sender.address_for(self.node_id, rank))
        try:
            serve(receiver, rank)
        finally:
            receiver.close()

    def close(self) -> None:
        self.sender.close(EPOCH)
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


def acknowledge(receiver: StepReceiver, rank: int) -> None:
    while (plan := receiver.receive(EPOCH)) is not None:
        receiver.send(StepResult(plan.epoch, plan.step, rank, pack_ints([plan.step])))


@pytest.fixture(params=["local", "tcp"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(NODE, str(tmp_path), None if request.param == "local" else HOST)


@pytest.fixture
def open_channel() -> Iterator[Callable[..., Channel]]:
    channels: list[Channel] = []

    def make(*arguments: object) -> Channel:
        channels.append(Channel(*arguments))  # type: ignore[arg-type]
        channels[-1].sender.wait_for_workers(WAIT_S, lambda: None)
        return channels[-1]

    yield make
    for channel in channels:
        channel.close()


def test_every_plan_reaches_all_workers_and_all_results_come_back(
    open_channel: Callable[..., Channel], place: Place
) -> None:
    sender = open_channel(place, 3, acknowledge).sender

    for step in range(1, 50):
        plan = make_plan(step)
        sender.send(plan)
        results = sender.receive(plan, WAIT_S, lambda: None)

        assert sorted(result.rank for result in results) == [0, 1, 2]
        assert {result.step for result in results} == {step}


@pytest.mark.parametrize("ranks_per_batch", [1, 2])
def test_a_worker_gets_the_batch_of_its_own_rank_only(
    open_channel: Callable[..., Channel], place: Place, ranks_per_batch: int
) -> None:
    plans: dict[int, list[RankPlan]] = {rank: [] for rank in range(4)}

    def note(receiver: StepReceiver, rank: int) -> None:
        while (plan := receiver.receive(EPOCH)) is not None:
            plans[rank].append(plan)
            receiver.send(StepResult(plan.epoch, plan.step, rank))

    sender = open_channel(place, 4, note, ranks_per_batch).sender
    sent = [make_plan(step, num_batches=4 // ranks_per_batch) for step in range(1, 6)]
    for plan in sent:
        sender.send(plan)
        sender.receive(plan, WAIT_S, lambda: None)

    for rank, got in plans.items():
        assert got == [plan.for_rank(rank // ranks_per_batch) for plan in sent]
        prompts = [unpack_ints(start.token_ids).tolist() for p in got for start in p.batch.started]
        assert prompts == [[rank // ranks_per_batch]] * 5


def test_all_workers_get_a_message_that_is_no_plan(
    open_channel: Callable[..., Channel], place: Place
) -> None:
    def answer(receiver: StepReceiver, rank: int) -> None:
        while (order := receiver.receive(EPOCH)) is not None:
            receiver.send(Resumed(order.next_epoch, rank, f"rank {rank}"))

    sender = open_channel(place, 3, answer, 1).sender

    sender.send(Resume(EPOCH, EPOCH + 1))

    errors = sender.receive_resumed(EPOCH + 1, WAIT_S, lambda: None)
    assert errors == {rank: f"rank {rank}" for rank in range(3)}


def test_plans_of_another_epoch_are_dropped_by_workers(
    open_channel: Callable[..., Channel], place: Place
) -> None:
    sender = open_channel(place, 1, acknowledge).sender
    sender.send(make_plan(1, epoch=EPOCH - 1))
    sender.send(Shutdown(EPOCH - 1))

    sender.send(make_plan(2))

    [result] = sender.receive(make_plan(2), WAIT_S, lambda: None)
    assert (result.epoch, result.step) == (EPOCH, 2)


def test_results_of_another_epoch_or_step_are_dropped_by_the_engine(
    open_channel: Callable[..., Channel], place: Place
) -> None:
    def answer_twice(receiver: StepReceiver, rank: int) -> None:
        while (plan := receiver.receive(EPOCH)) is not None:
            receiver.send(StepResult(plan.epoch - 1, plan.step, rank, error="stale"))
            receiver.send(StepResult(plan.epoch, plan.step - 1, rank, error="stale"))
            receiver.send(StepResult(plan.epoch, plan.step, rank))

    sender = open_channel(place, 1, answer_twice).sender
    sender.send(make_plan(2))

    [result] = sender.receive(make_plan(2), WAIT_S, lambda: None)

    assert result == StepResult(EPOCH, 2, 0)


def test_a_failure_of_the_step_behind_ends_the_wait(
    open_channel: Callable[..., Channel], place: Place
) -> None:
    def fail_later(receiver: StepReceiver, rank: int) -> None:
        while (plan := receiver.receive(EPOCH)) is not None:
            receiver.send(StepResult(plan.epoch, plan.step + 1, rank, error="out of luck"))

    sender = open_channel(place, 1, fail_later).sender
    sender.send(make_plan(2))

    with pytest.raises(WorkerLostError, match="out of luck"):
        sender.receive(make_plan(2), WAIT_S, lambda: None)


def test_a_silent_worker_is_named(open_channel: Callable[..., Channel], tmp_path: Path) -> None:
    def serve(receiver: StepReceiver, rank: int) -> None:
        while (plan := receiver.receive(EPOCH)) is not None:
            if rank != 1:
                receiver.send(StepResult(plan.epoch, plan.step, rank))

    sender = open_channel(Place(NODE, str(tmp_path)), 3, serve).sender
    sender.send(make_plan())

    with pytest.raises(WorkerLostError, match="rank 5 within") as caught:
        sender.receive(make_plan(), 0.3, lambda: None)

    assert caught.value.rank == 5


def test_of_silent_workers_the_one_is_named_that_says_nothing(tmp_path: Path) -> None:
    statuses = {0: {"waits": True, "doing": ""}, 1: None, 2: {"waits": True, "doing": ""}}
    sender = StepSender(
        (4, 5, 6),
        Place(NODE, str(tmp_path)),
        ask=lambda ranks: {r: statuses[r] for r in ranks},
        ranks_per_batch=3,
    )

    with pytest.raises(WorkerLostError, match="rank 5 does not say where it stands") as caught:
        sender.receive(make_plan(), 0.2, lambda: None)

    assert caught.value.rank == 5
    assert "not answered by rank 4, 5, 6" in str(caught.value)
    sender.close(EPOCH)


def test_junk_among_results_harms_nobody(
    open_channel: Callable[..., Channel], tmp_path: Path
) -> None:
    sender = open_channel(Place(NODE, str(tmp_path), HOST), 1, acknowledge).sender
    context = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    sender.address_for("other node", 0).results.connect(stranger)
    junk = (b"", b"\x81\xa4type\xa4\xff\xfe", b"\x91" * 10_000, encoder.encode({"type": "result"}),
            encoder.encode(StepResult(EPOCH, 1, 99)))  # fmt: skip
    thread = threading.Thread(
        target=lambda: [stranger.send(junk[i % len(junk)]) for i in range(NUM_JUNK)]
    )
    thread.start()

    for step in range(1, 50):
        sender.send(make_plan(step))
        assert sender.receive(make_plan(step), 60.0, lambda: None)[0].step == step
    while thread.is_alive():
        sender.send(make_plan(50))
        sender.receive(make_plan(50), 60.0, lambda: None)
    thread.join()
    context.destroy(linger=0)


def test_junk_among_plans_harms_nobody(tmp_path: Path) -> None:
    sender = StepSender((0,), Place(NODE, str(tmp_path)))
    receiver = StepReceiver(sender.address_for(NODE, 0))
    sender.wait_for_workers(WAIT_S, lambda: None)
    for junk in (b"", b"\x81\xa4type\xa4\xff\xfe", b"\x91" * 10_000):
        sender._local.send([junk])

    sender.send(make_plan())

    assert receiver.receive(EPOCH) == make_plan().for_rank(0)
    receiver.close()
    sender.close(EPOCH)


def test_a_worker_that_reports_an_error_is_named(
    open_channel: Callable[..., Channel], tmp_path: Path
) -> None:
    def fail(receiver: StepReceiver, rank: int) -> None:
        while (plan := receiver.receive(EPOCH)) is not None:
            receiver.send(StepResult(plan.epoch, plan.step, rank, error="no luck"))

    sender = open_channel(Place(NODE, str(tmp_path)), 1, fail).sender
    sender.send(make_plan())

    with pytest.raises(WorkerLostError, match="rank 4 in SERVING: no luck"):
        sender.receive(make_plan(), WAIT_S, lambda: None)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_worker_that_fails_while_only_copies_run_is_named(
    open_channel: Callable[..., Channel], place: Place, *, is_old: bool
) -> None:
    def fail(receiver: StepReceiver, rank: int) -> None:
        while (order := receiver.receive(EPOCH)) is not None:
            epoch = order.epoch - is_old
            receiver.send(StepResult(epoch, 7, rank, error="no luck", fault="link"))
            receiver.send(CopiedBlocks(order.epoch, 1, rank))

    sender = open_channel(place, 1, fail).sender
    sender.send_copies(EPOCH, 1, [()])

    def is_answered() -> bool:
        sender.poll_copied(EPOCH)
        return bool(sender.take_copied())

    if is_old:
        wait_until(is_answered, "no answer")
    else:
        with pytest.raises(DeviceFaultError, match="rank 4 in SERVING: no luck"):
            wait_until(is_answered, "no answer")


def test_a_wait_ends_when_the_caller_says_so(
    open_channel: Callable[..., Channel], tmp_path: Path
) -> None:
    def check() -> None:
        raise WorkerLostError("somebody told us")

    def never_answer(receiver: StepReceiver, rank: int) -> None:
        while receiver.receive(EPOCH) is not None:
            pass

    sender = open_channel(Place(NODE, str(tmp_path)), 1, never_answer).sender
    sender.send(make_plan())

    with pytest.raises(WorkerLostError, match="somebody told us"):
        sender.receive(make_plan(), WAIT_S, check)


def test_workers_that_do_not_come_are_counted(tmp_path: Path) -> None:
    sender = StepSender((0, 1), Place(NODE, str(tmp_path)))

    with pytest.raises(WorkerStartTimeoutError, match="0 of 2"):
        sender.wait_for_workers(0.2, lambda: None)

    sender.close(EPOCH)


def test_messages_are_plain_messagepack() -> None:
    plan = msgpack.unpackb(encoder.encode(make_plan(7).for_rank(0)))
    result = msgpack.unpackb(encoder.encode(StepResult(EPOCH, 7, 0, pack_ints([11, -1]))))

    assert (plan["type"], plan["step"], plan["graph"]) == ("step", 7, None)
    batch = plan["batch"]
    assert np.frombuffer(batch["scheduled"], "<i4").tolist() == [0, 0, 1, 1]
    assert batch["started"][0]["sampling"] == {"seed": 9}
    assert np.frombuffer(result["token_ids"], "<i4").tolist() == [11, -1]


def test_a_worker_can_look_whether_a_plan_waits(tmp_path: Path) -> None:
    sender = StepSender((0,), Place(NODE, str(tmp_path)))
    receiver = StepReceiver(sender.address_for(NODE, 0))
    try:
        sender.wait_for_workers(WAIT_S, lambda: None)
        assert not receiver.has_message()

        sender.send(make_plan())

        deadline_s = time.monotonic() + WAIT_S
        while not receiver.has_message():
            assert time.monotonic() < deadline_s
        assert receiver.receive(EPOCH) == make_plan().for_rank(0)
        assert not receiver.has_message()
    finally:
        receiver.close()
        sender.close(EPOCH)


def test_a_worker_that_waits_is_told_that_no_step_comes(place: Place) -> None:
    ends: list[str] = []
    receivers: list[StepReceiver] = []

    def wait(receiver: StepReceiver, rank: int) -> None:
        receivers.append(receiver)
        try:
            receiver.receive(EPOCH)
        except EngineDeadError as e:
            ends.append(str(e))

    channel = Channel(place, 1, wait)
    channel.sender.wait_for_workers(WAIT_S, lambda: None)
    wait_until(lambda: bool(receivers), "nobody waits")

    receivers[0].end()

    channel.threads[0].join(WAIT_S)
    assert len(ends) == 1
    channel.close()
