"""The engine sends messages that continue copies of KV blocks. At most two messages are unanswered
at a time, and no request waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from dist_aclgraph.actors.engine import copy_link
from dist_aclgraph.actors.engine.copy_link import CopyLink
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.group_files import GroupFiles
from dist_aclgraph.kv.look_ups import Files, LookUps, Source
from dist_aclgraph.kv.tiers import CachePlace
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.file_upkeep import TOUCH_S
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.copies import CopiedBlocks, CopyJob
from tests.plans import make_plan
from tests.unit.scheduler.requests import submit

BLOCK, WORKERS, TIMEOUT_S, EPOCH = 4, 2, 20.0, 3


@dataclass
class FakeChannel:
    num_workers: ClassVar[int] = WORKERS
    sent: list[tuple[int, list[tuple[CopyJob, ...]]]] = field(default_factory=list)
    replies: list[CopiedBlocks] = field(default_factory=list)

    def send_copies(self, epoch: int, number: int, jobs: list[tuple[CopyJob, ...]]) -> None:
        assert epoch == EPOCH
        self.sent.append((number, jobs))

    def poll_copied(self, epoch: int) -> None:
        pass

    def take_copied(self) -> list[CopiedBlocks]:
        replies, self.replies = self.replies, []
        return replies

    def reply(
        self, rank: int, *ended: tuple[int, int], epoch: int = EPOCH, to: int = -1, **num_read: int
    ) -> None:
        """Reply to the message with the index ``to``."""
        self.replies.append(CopiedBlocks(epoch, self.sent[to][0], rank, ended, num_read))


class World:
    """A scheduler with one request, whose three blocks have files."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        num_pools: int = 1,
        files: GroupFiles | None = None,
        source: Source | None = None,
    ) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(copy_link.time, "monotonic", lambda: self.now_s)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
            [BlockPool(32, BLOCK) for _ in range(num_pools)],
            GraphDispatcher(make_plan(4)),
            max_model_len=64,
            epoch=EPOCH,
            tp=WORKERS // num_pools,
            look_ups=LookUps(Files(lambda block_hash: True)),
            files=files,
        )
        self.channel = FakeChannel()
        self.link = CopyLink(self.scheduler, self.channel, TIMEOUT_S)  # type: ignore[arg-type]
        self.source = source
        self.add("a", 0)

    def add(self, name: str, first_token: int) -> None:
        """Submit a request with three full blocks and one further token."""
        tokens = list(range(first_token, first_token + 3 * BLOCK + 1))
        request = submit(name, tokens, SamplingParams(max_tokens=2))
        request.source = self.source
        self.scheduler.add(request)

    def turn(self) -> int:
        """Return the number of tokens in the next step; 0 if there is nothing to run."""
        plan = self.scheduler.schedule()
        self.link.turn(is_idle=plan is None)
        return 0 if plan is None else plan.largest.num_tokens


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_request_runs_when_all_workers_have_read_its_blocks(world: World) -> None:
    assert world.turn() == 0
    ((number, (jobs,)),) = world.channel.sent
    assert [job.is_load for job in jobs] == [True]
    world.channel.reply(0, (jobs[0].number, 3))
    assert world.turn() == 0 and len(world.channel.sent) == 1, "a worker has not answered"
    world.channel.reply(1)
    assert world.turn() == 0
    assert [number for number, _ in world.channel.sent] == [number, number + 1]
    world.channel.reply(1, (jobs[0].number, 2))
    world.turn()
    assert world.turn() == 1 + BLOCK, "a worker has read two blocks only"
    assert world.scheduler.copies.counts()["missed"] == 1


def test_while_steps_run_a_worker_may_be_one_message_behind(world: World) -> None:
    """Answers arrive after the decision of a step. So a step sends the next message before the
    previous message is answered.
    """

    def sent(*, is_idle: bool) -> int:
        world.link.turn(is_idle=is_idle)
        return len(world.channel.sent)

    world.turn()
    assert [sent(is_idle=True), sent(is_idle=False), sent(is_idle=False)] == [1, 2, 2]
    for rank in range(WORKERS):
        assert sent(is_idle=False) == 2, "a worker has not answered"
        world.channel.reply(rank, to=0)
    assert [sent(is_idle=False), sent(is_idle=False), sent(is_idle=True)] == [3, 3, 3]
    for rank in range(WORKERS):
        world.channel.reply(rank)
    assert [sent(is_idle=True), sent(is_idle=True)] == [4, 4]


def test_a_request_does_not_wait_for_workers_that_read_for_ever(world: World) -> None:
    world.turn()
    for rank in range(WORKERS):
        world.channel.reply(rank)
    world.now_s += TIMEOUT_S + 1
    world.turn()
    assert world.turn() == 3 * BLOCK + 1
    pool, ((_, (jobs,)), *_) = world.scheduler.ranks[0].pool, world.channel.sent
    used = pool.num_used
    for rank in range(WORKERS):
        world.channel.reply(rank, (jobs[0].number, 3))
    world.link.turn(is_idle=False)
    assert pool.num_used == used - 3, "the copy held its blocks until it ended"


def test_no_request_waits_for_copies_again_until_one_ends(world: World) -> None:
    world.turn()
    ((_, (jobs,)), *_) = world.channel.sent
    world.now_s += TIMEOUT_S + 1
    world.turn()
    other = submit("b", list(range(50, 50 + 3 * BLOCK + 1)), SamplingParams(max_tokens=2))
    world.scheduler.add(other)
    assert world.turn() == 2 * (3 * BLOCK + 1), "both are computed"
    assert world.scheduler.copies.have_ended(other)
    for rank in range(WORKERS):
        world.channel.reply(rank, (jobs[0].number, 0))
    world.link.turn(is_idle=False)
    world.scheduler.add(submit("c", list(range(90, 90 + 3 * BLOCK + 1)), SamplingParams()))
    world.turn()
    assert [job.is_load for _, (jobs,) in world.channel.sent for job in jobs] == [True, True]


@pytest.mark.parametrize("source", [None, Source(b"a source", lambda: True)])
def test_no_request_waits_for_a_node_that_never_answers_a_look_up(
    monkeypatch: pytest.MonkeyPatch, source: Source | None
) -> None:
    """If ``source`` is None, no worker of the request's rank runs on the engine's node."""
    places = tuple(CachePlace(rank, 2, num_kv_heads=2) for rank in range(WORKERS))
    files = GroupFiles(places if source else places[:1], ("a", "b"))
    world = World(monkeypatch, 1 if source else 2, files, source)
    if source is None:  # rank 0 becomes full, so the request starts on rank 1
        pool = world.scheduler.ranks[0].pool
        pool.allocate(pool.num_free)
    assert world.turn() == 0
    world.now_s += TIMEOUT_S + 1
    world.turn()
    assert world.turn() == 3 * BLOCK + 1
    world.add("b", 50)
    assert world.turn() == 1 + 3 * BLOCK + 1, "a later request does not wait again"
    assert len(world.channel.sent) == 1, "the worker has not answered"


@pytest.mark.parametrize("num_pools", [1, 2])
def test_a_worker_that_answers_does_not_hide_one_that_reads_for_ever(
    monkeypatch: pytest.MonkeyPatch, num_pools: int
) -> None:
    """The two workers belong to one data-parallel rank, or to two data-parallel ranks."""
    world = World(monkeypatch, num_pools)
    copies, num_tokens = world.scheduler.copies.ranks[-1], []
    for number in range(4):
        copies.condemn([bytes([number]) * 16])
        num_tokens.append(world.turn())
        jobs = world.channel.sent[-1][1][-1]
        world.channel.reply(1, *((job.number, 0) for job in jobs))
        world.now_s += TIMEOUT_S / 2
    assert num_tokens == [0, 0, 0, 0]
    assert world.turn() == 3 * BLOCK + 1
    assert copies.find([b"x" * 16])() == 1
    other = submit("b", [1] * (BLOCK + 1), SamplingParams())
    assert copies.load(other, [], [b"x" * 16]) == (num_pools == 2), "the other rank still reads"


def test_files_of_cached_blocks_are_touched_at_most_once_in_a_while(world: World) -> None:
    world.scheduler.abort("a")
    copies = world.scheduler.copies.ranks[0]

    def touches() -> int:
        copies.note_used([b"x" * 16])
        world.turn()
        sent, world.channel.sent = world.channel.sent, []
        for _, (jobs,) in sent:
            for job in jobs:
                for rank in range(WORKERS):
                    copies.end(job.number, rank, 0)
        return sum(job.kind == "touch" for _, (jobs,) in sent for job in jobs)

    assert touches() == 0
    world.now_s += TOUCH_S
    assert [touches(), touches()] == [1, 0]


def test_blocks_that_were_read_are_counted_once_for_all_workers(world: World) -> None:
    world.turn()
    assert world.link.num_read() == {}
    world.channel.reply(0, host=2, disk=1)
    world.channel.reply(1, host=3)
    world.turn()
    assert world.link.num_read() == {"host": 2, "disk": 1}


def test_replies_of_an_earlier_epoch_are_ignored(world: World) -> None:
    world.turn()
    ((_, (jobs,)),) = world.channel.sent
    for rank in range(WORKERS):
        world.channel.reply(rank, (jobs[0].number, 3), epoch=EPOCH - 1)
    assert world.turn() == 0 and world.scheduler.copies.is_running


def test_a_group_that_resumes_forgets_its_copies(world: World) -> None:
    world.turn()
    world.scheduler.rewind(EPOCH)
    world.link.reset()
    assert not world.scheduler.copies.is_running
    assert world.turn() == 3 * BLOCK + 1
