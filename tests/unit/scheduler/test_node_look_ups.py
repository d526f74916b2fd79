"""On nodes without the engine, workers look up files. The scheduler does not wait for a look-up
that nobody answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.group_files import GroupFiles
from dist_aclgraph.kv.look_ups import Answer, Files, LookUps, Source
from dist_aclgraph.kv.tiers import CachePlace
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.group_copies import GroupCopies
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.scheduler.waiting_requests import WaitingRequests
from dist_aclgraph.steps.copies import CopyJob
from tests.plans import make_plan
from tests.unit.scheduler.requests import submit
from tests.unit.scheduler.test_block_copies import World as Blocks
from tests.unit.scheduler.test_data_parallel import finish, start

HALVES = tuple(CachePlace(heads, 2, num_kv_heads=2, rank=heads, num_ranks=2) for heads in (0, 1))
NAMES = [bytes([number]) * 16 for number in range(5)]
MESSAGE = b"a source"
SOURCE = Source(MESSAGE, lambda: True)


class World:
    """The copies of KV in a group of two data-parallel ranks with two workers each, on the nodes
    "a" to "c".

    Workers 0 and 1 are on the nodes a and b. Workers 2 and 3 are on the nodes b and c.
    """

    def __init__(self, node_ids: str = "abbc", *, only_workers: bool = False) -> None:
        self.here: set[bytes] = set()
        self.copies = GroupCopies(
            [BlockPool(64, 4) for _ in range(2)],
            LookUps(Files(self.here.__contains__)),
            2,
            WaitingRequests(),
            GroupFiles(HALVES, tuple(node_ids), only_workers),
        )

    def find(
        self,
        dp_rank: int,
        names: Sequence[bytes] = NAMES,
        first: int = 0,
        source: Source | None = None,
    ) -> Answer[int]:
        return self.copies.ranks[dp_rank].find(names, first, None, source)

    def job(self, dp_rank: int) -> CopyJob:
        jobs = self.copies.take_jobs(is_idle=False)
        assert not jobs[1 - dp_rank]
        (job,) = jobs[dp_rank]
        assert job.kind == "find"
        return job


def test_a_group_on_one_node_asks_no_worker() -> None:
    world = World("aaaa")
    world.here.update(NAMES)
    assert world.find(0, source=SOURCE)() == world.find(1)() == len(NAMES)
    assert not any(world.copies.take_jobs(is_idle=True)) and not world.copies.is_running


def test_workers_fetch_to_the_engines_node_if_the_transport_needs_a_device() -> None:
    """If the engine looked up files before the fetch, it would find too few files on its node."""
    world = World("aaab", only_workers=True)
    world.here.update(NAMES[:2])
    assert world.find(0)() == 2, "without a source, no worker is asked"
    answer = world.find(0, source=SOURCE)
    assert world.job(0).source == MESSAGE and answer() is None
    world.copies.end(0, 0, 4)
    assert answer() == 4

    answer = world.find(1, NAMES, 1, SOURCE)
    job = world.job(1)
    world.copies.end(job.number, 2, 3)
    assert answer() is None, "the rank is on two nodes"
    world.copies.end(job.number, 3, 2)
    assert answer() == 3


def test_without_a_source_only_the_engines_node_is_asked_if_it_has_a_worker() -> None:
    world = World()
    world.here.update(NAMES[:3])
    assert world.find(0)() == 3
    assert not any(world.copies.take_jobs(is_idle=True))


def test_all_nodes_of_a_rank_are_asked_if_blocks_may_have_to_be_fetched() -> None:
    world = World()
    world.here.update(NAMES)
    answer = world.find(0, first=1, source=SOURCE)
    job = world.job(0)
    assert (job.source, job.hashes) == (MESSAGE, b"".join(NAMES[1:]))
    assert answer() is None and world.copies.is_running
    world.copies.end(job.number, 0, 0)
    assert answer() is None, "worker 0 was not asked"
    world.copies.end(job.number, 1, 2)
    assert answer() == 3 and not world.copies.is_running, "one cached block, and two files"


def test_the_engines_node_can_have_fewer_files_than_the_others() -> None:
    world = World()
    world.here.update(NAMES[:2])
    answer = world.find(0, source=SOURCE)
    world.copies.end(world.job(0).number, 1, 5)
    assert answer() == 2


@pytest.mark.parametrize("source", [None, SOURCE])
@pytest.mark.parametrize("ranks", [(2, 3), (3, 2)])
def test_a_rank_without_a_worker_beside_the_engine_uses_no_file_there(
    source: Source | None, ranks: tuple[int, int]
) -> None:
    world = World()
    world.here.update(NAMES)
    answer = world.find(1, source=source)
    job = world.job(1)
    assert job.source == (b"" if source is None else MESSAGE)
    world.copies.end(job.number, ranks[0], ranks[0])
    assert answer() is None
    world.copies.end(job.number, ranks[1], ranks[1])
    assert answer() == 2, "the smallest answer"


def test_nothing_is_asked_for_no_blocks() -> None:
    assert World().find(1, [], source=SOURCE)() == 0


def test_answers_to_forgotten_look_ups_are_ignored() -> None:
    """When an epoch ends, its look-ups are forgotten. Their late answers change nothing."""
    world = World()
    answer = world.find(1, first=1)
    job = world.job(1)
    world.copies.forget()
    assert answer() == 1 and not world.copies.is_running
    world.copies.end(job.number, 2, 4)
    assert answer() == 1


def test_a_fetch_on_another_node_ends_with_its_request() -> None:
    world, is_wanted = World(), [True]
    world.find(0, source=Source(MESSAGE, lambda: is_wanted[0]))
    job = world.job(0)
    assert not any(world.copies.take_jobs(is_idle=False))
    is_wanted[0] = False
    ((cancelled,), _) = world.copies.take_jobs(is_idle=False)
    assert (cancelled.kind, cancelled.number) == ("cancel", job.number)
    assert not world.copies.is_running
    world.copies.end(job.number, 1, 3)
    assert not any(world.copies.take_jobs(is_idle=False))


def test_a_request_starts_on_the_rank_whose_nodes_were_asked() -> None:
    """When the answers come, another rank may have the fewest requests."""
    here: set[bytes] = set()
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        [BlockPool(32, 4) for _ in range(2)],
        GraphDispatcher(make_plan(4)),
        max_model_len=64,
        tp=2,
        look_ups=LookUps(Files(here.__contains__)),
        files=GroupFiles(HALVES, tuple("aabb")),
    )
    start(scheduler, submit("first", [1] * 9, SamplingParams(max_tokens=9)))
    finish(scheduler, [5], [], tp=2)
    start(scheduler, submit("second", range(9), SamplingParams(max_tokens=9)))
    finish(scheduler, [5], [], tp=2)
    jobs = scheduler.copies.take_jobs(is_idle=False)
    assert [[job.kind for job in each] for each in jobs] == [[], ["find"]]
    scheduler.abort("first")
    scheduler.copies.end(jobs[1][0].number, 2, 2)
    scheduler.schedule()
    jobs = scheduler.copies.take_jobs(is_idle=False)
    assert [[job.kind for job in each] for each in jobs] == [[], ["load"]]


def test_look_ups_are_divided_among_ranks_and_each_request_has_only_one() -> None:
    here: set[bytes] = set()
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64),
        [BlockPool(32, 4) for _ in range(3)],
        GraphDispatcher(make_plan(4)),
        max_model_len=64,
        tp=2,
        look_ups=LookUps(Files(here.__contains__)),
        files=GroupFiles(HALVES, tuple("aabbcc")),
    )
    start(scheduler, submit("first", [1] * 9, SamplingParams(max_tokens=9)))
    finish(scheduler, [5], [], [], tp=2)
    second, third = (submit(str(n), range(n, n + 9), SamplingParams()) for n in (2, 30))
    start(scheduler, second, third)
    finish(scheduler, [5], [], [], tp=2)
    jobs = scheduler.copies.take_jobs(is_idle=False)
    assert [[job.kind for job in each] for each in jobs] == [[], ["find"], ["find"]]
    start(scheduler, submit("short", [1], SamplingParams(max_tokens=9)))
    scheduler.copies.end(jobs[1][0].number, 2, 0)
    finish(scheduler, [5], [5], [], tp=2)
    scheduler.schedule()
    assert second.dp_rank == 2, "the short request has taken the only row of rank 1"
    assert not any(scheduler.copies.take_jobs(is_idle=False)), "no second look-up"
    assert scheduler.waiting.num_fetching == {1: 0, 2: 1}
    scheduler.abort(third.request_id)
    assert scheduler.waiting.num_fetching == {1: 0, 2: 0}


def test_a_rank_without_a_worker_beside_the_engine_writes_blocks_that_have_files_there() -> None:
    world, blocks = World(), Blocks()
    world.here.update(blocks.hashes)
    for dp_rank, copies in enumerate(world.copies.ranks):
        pool = copies._pool
        blocks.request.block_ids = pool.allocate(len(blocks.hashes))
        for index, block_id in enumerate(blocks.request.block_ids):
            pool.store(block_id, blocks.hashes[index])
            copies.note_stored(blocks.request, index)
        kinds = [job.kind for job in copies.take_jobs(is_idle=True)]
        assert kinds == ["save"][:dp_rank]
