"""The scheduler decides which blocks are written to files, and which are read from files. There is
no device, and there are no files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.checkpoints import Checkpoints
from dist_aclgraph.kv.look_ups import Files, LookUps
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.block_copies import WAIT_S, BlockCopies
from dist_aclgraph.scheduler.file_upkeep import MAX_TOUCHED
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.routing import block_hashes
from dist_aclgraph.steps.copies import CopyJob
from tests.unit.scheduler.requests import submit

BLOCK, NUM_FULL = 4, 5


class World:
    """The blocks of one request, and the hashes of the files in the first rank's folder."""

    def __init__(self, num_blocks: int = 64, ranks: Sequence[int] = (0,), **options: Any) -> None:
        self.pool = BlockPool(num_blocks, BLOCK, **options)
        self.files: set[bytes] = set()
        self.now_s = 0.0
        look_ups = LookUps(Files(self.files.__contains__), lambda: self.now_s)
        self.copies = BlockCopies(self.pool, look_ups, ranks)
        self.request = submit("a", range(BLOCK * NUM_FULL + 1), SamplingParams())
        self.hashes = block_hashes(self.request.tokens.tobytes(), "", BLOCK)
        self.request.hashes = list(self.hashes)

    def compute(self) -> None:
        """Store all blocks of the request in the prefix cache, as if they had been computed."""
        self.request.block_ids = self.pool.allocate(NUM_FULL)
        for index, block_id in enumerate(self.request.block_ids):
            self.pool.store(block_id, self.hashes[index])
            self.copies.note_stored(self.request, index)

    def begin(self) -> list[CopyJob]:
        return list(self.copies.take_jobs(is_idle=True))


def test_nothing_is_read_if_the_first_block_has_no_file() -> None:
    """Files are read only up to the first block without a file. Blocks in the device's cache need
    no file.
    """
    world = World()
    world.files.update(world.hashes[1:])
    assert world.copies.find(world.hashes)() == 0
    world.files.update(world.hashes[:1])
    assert world.copies.find(world.hashes)() == NUM_FULL
    world.files.difference_update(world.hashes[3:])
    assert world.copies.find(world.hashes)() == 3
    assert world.copies.find(world.hashes, 2)() == 3, "two cached blocks, and a file"
    assert world.copies.find([])() == 0


def test_blocks_without_files_are_fetched_and_looked_up_again() -> None:
    world, fetched, wanted = World(), [False], []

    def fetch(hashes: Sequence[bytes], depth: int) -> Callable[[], bool | None]:
        wanted.append((list(hashes), depth))
        return lambda: fetched[0] or None

    world.files.update(world.hashes[:2])
    answer = world.copies.find(world.hashes, 1, fetch)
    assert answer() is None and answer() is None
    assert wanted == [(world.hashes[2:], 2)], "the first two blocks need no fetch"
    world.files.update(world.hashes[:4])
    fetched[0] = True
    assert answer() == answer() == 4
    assert len(wanted) == 1


def test_nothing_is_fetched_if_all_blocks_have_files() -> None:
    world = World()
    world.files.update(world.hashes)
    assert world.copies.find(world.hashes, 0, lambda *_: pytest.fail("a fetch"))() == NUM_FULL


def test_a_block_that_a_rank_could_not_read_is_written_again() -> None:
    """Look-ups check only the first rank's files. So if only another rank lacks a file, look-ups do
    not notice it.
    """
    world = World(ranks=(0, 1))
    world.files.update(world.hashes)
    request: Request = world.request
    assert world.copies.load(request, [], world.hashes)
    (job,) = world.begin()
    assert world.copies.end(job.number, 0, NUM_FULL) is None
    assert world.copies.end(job.number, 1, 2) is request
    world.pool.allocate(world.pool.num_free)  # other requests evict the blocks
    world.pool.free(list(range(1, NUM_FULL + 1)))
    world.compute()
    (job,) = world.begin()
    assert not job.is_load and job.hashes == b"".join(world.hashes[2:])
    for rank in (0, 1):
        world.copies.end(job.number, rank, len(unpack_ints(job.block_ids)))
    world.copies.note_stored(request, 2)
    assert world.begin() == [], "all ranks have the file now"


def test_a_state_that_a_rank_could_not_read_is_written_again() -> None:
    world = World(checkpoints=Checkpoints(2, 1))
    last, checkpoints = world.hashes[-1], world.pool.checkpoints
    has = world.files.__contains__
    copies = BlockCopies(world.pool, LookUps(Files(has, has)), (0, 1))
    world.files.update(world.hashes)
    assert checkpoints is not None and copies.load(world.request, [], world.hashes)
    (job,) = copies.take_jobs(is_idle=True)
    for rank, count in enumerate((NUM_FULL, 0)):
        copies.end(job.number, rank, count)
    checkpoints.begin(last)
    checkpoints.store(last)
    copies.note_checkpoint(last)
    (job,) = copies.take_jobs(is_idle=True)
    assert job.state_hashes == last and not job.is_load


def test_files_that_might_contain_nan_are_deleted_when_they_are_complete() -> None:
    world = World(ranks=(0, 1))
    world.compute()
    (save,) = world.begin()
    world.files.update(world.hashes)
    world.copies.condemn(world.hashes[1:])
    assert world.begin() == [] and world.copies.is_busy, "two ranks are writing the files"
    assert world.copies.find(world.hashes)() == 1
    for rank in (0, 1):
        world.copies.end(save.number, rank, NUM_FULL)
    (job,) = world.begin()
    assert job.kind == "delete" and job.hashes == b"".join(world.hashes[1:])
    assert not job.state_hashes and world.begin() == []
    world.copies.end(job.number, 0, 0)
    assert world.copies.find(world.hashes)() == 1, "a rank has not deleted its files"
    world.copies.end(job.number, 1, 0)
    assert not world.copies.is_busy
    assert world.copies.find(world.hashes)() == NUM_FULL, "files that were written later"


def test_a_block_that_is_condemned_after_its_look_up_is_not_read() -> None:
    world = World()
    world.files.update(world.hashes)
    assert world.copies.find(world.hashes)() == NUM_FULL
    world.copies.condemn(world.hashes[3:])
    assert not world.copies.load(world.request, [], world.hashes)
    assert world.copies.load(world.request, [], world.hashes[:3])


def test_a_block_that_is_condemned_while_it_is_read_is_not_used() -> None:
    world = World()
    assert world.copies.load(world.request, [], world.hashes)
    (load,) = world.begin()
    world.copies.condemn(world.hashes[3:])
    assert world.begin() == [], "the end of the job must know the condemned blocks"
    assert world.copies.end(load.number, 0, NUM_FULL) is world.request
    assert len(world.pool.match(world.hashes)) == 3 and world.pool.num_used == 0
    assert set(unpack_ints(load.block_ids)[3:]) < set(world.pool.take_dirty())
    (job,) = world.begin()
    assert job.kind == "delete" and job.hashes == b"".join(world.hashes[3:])


def test_files_of_cached_blocks_are_touched_now_and_then() -> None:
    world = World()
    for _ in range(3):
        world.copies.note_used(world.hashes[:3])
    assert world.begin() == []
    (job,) = world.copies.take_jobs(is_idle=False, may_touch=True)
    assert job.kind == "touch" and job.hashes == b"".join(world.hashes[:3])
    assert unpack_ints(job.depths).tolist() == [0, 1, 2] and not job.block_ids
    world.copies.note_used(world.hashes)
    assert not world.copies.take_jobs(is_idle=False, may_touch=True), "a job is running"
    world.copies.end(job.number, 0, 0)
    assert len(world.copies.take_jobs(is_idle=False, may_touch=True)) == 1
    assert not world.copies.take_jobs(is_idle=False, may_touch=True)


def test_one_job_touches_a_limited_number_of_files() -> None:
    has = set[bytes]().__contains__
    copies = BlockCopies(BlockPool(4, BLOCK), LookUps(Files(has, has)), (0,))
    hashes = [number.to_bytes(16, "big") for number in range(2 * MAX_TOUCHED)]
    copies.note_used(hashes[:-8])
    copies.note_used(hashes[-8:])
    (job,) = copies.take_jobs(is_idle=False, may_touch=True)
    assert job.hashes == b"".join(hashes[:MAX_TOUCHED])
    assert job.state_hashes == hashes[-9], "the checkpoint from which the request started"


def test_a_deletion_that_workers_have_dropped_begins_again() -> None:
    has = set[bytes]().__contains__
    world = World(checkpoints=Checkpoints(2, 1))
    copies = BlockCopies(world.pool, LookUps(Files(has, has)), (0,))
    copies.condemn(world.hashes)
    (job,) = copies.take_jobs(is_idle=False)
    assert job.state_hashes == job.hashes == b"".join(world.hashes)
    copies.forget()
    (again,) = copies.take_jobs(is_idle=False)
    copies.condemn(world.hashes[:1])
    copies.end(again.number, 0, 0)
    (last,) = copies.take_jobs(is_idle=False)
    assert (again.hashes, last.hashes) == (job.hashes, world.hashes[0])


@pytest.mark.parametrize(("counts_shared", "num_begun"), [(False, NUM_FULL), (True, 1)])
def test_copies_take_no_blocks_from_requests_where_shared_blocks_count(
    num_begun: int, *, counts_shared: bool
) -> None:
    world = World(8 * NUM_FULL + 1, counts_shared=counts_shared)
    world.pool.allocate(7 * NUM_FULL)
    world.compute()
    (job,) = world.begin()
    assert len(unpack_ints(job.block_ids)) == num_begun
    if counts_shared:
        world.copies.end(job.number, 0, 1)
        world.pool.free([1, 2, 3])
        (job,) = world.begin()
        assert len(unpack_ints(job.block_ids)) == 3


def test_nothing_is_looked_up_while_there_is_no_room_to_write() -> None:
    world = World(8 * NUM_FULL + 1)
    world.compute()
    (job,) = world.begin()
    looked_up: list[bytes] = []
    world.copies._look_ups.ask = looked_up.append  # type: ignore[assignment,method-assign]
    for index in range(NUM_FULL):
        world.copies.note_stored(world.request, index)
    assert len(job.hashes) == NUM_FULL * 16 and world.begin() == []
    assert not looked_up and world.copies.is_busy


def test_a_request_waits_while_too_many_blocks_are_being_read() -> None:
    """The request's blocks have files, so waiting takes less time than computing."""
    world = World(num_blocks=4 * NUM_FULL + 1)
    world.files.update(world.hashes)
    answers = [world.copies.find(world.hashes) for _ in range(3)]
    assert [answer() for answer in answers] == 3 * [NUM_FULL]
    assert world.copies.load(world.request, [], world.hashes)
    (job,) = world.begin()
    assert [answer() for answer in answers] == 3 * [None]
    assert world.copies.find([b"unknown"])() == 0, "a prompt without files computes at once"
    world.copies.end(job.number, 0, NUM_FULL)
    assert [answer() for answer in answers] == 3 * [NUM_FULL]


def test_no_request_waits_for_a_disk_that_never_supplies_blocks() -> None:
    world = World(num_blocks=4 * NUM_FULL + 1)
    world.files.update(world.hashes)
    assert world.copies.load(world.request, [], world.hashes)
    answer = world.copies.find(world.hashes)
    assert answer() is None and world.pool.num_free == 3 * NUM_FULL
    world.copies.note_late()
    assert answer() == NUM_FULL and not world.copies.load(world.request, [], world.hashes)


def test_a_slow_disk_delays_a_prompt_for_a_limited_time() -> None:
    world = World(num_blocks=4 * NUM_FULL + 1)
    world.files.update(world.hashes)
    assert world.copies.load(world.request, [], world.hashes)
    answer = world.copies.find(world.hashes, 1)
    assert answer() is None
    world.now_s = WAIT_S
    assert answer() is None
    world.now_s += 1.0
    assert answer() == 1, "the blocks after the cached one are computed"


def test_workers_that_drop_their_jobs_end_the_wait() -> None:
    world = World(num_blocks=4 * NUM_FULL + 1)
    world.files.update(world.hashes)
    assert world.copies.load(world.request, [], world.hashes)
    answer = world.copies.find(world.hashes)
    assert answer() is None
    world.copies.forget()
    assert answer() == NUM_FULL


def test_a_single_job_may_read_the_whole_pool() -> None:
    world = World(num_blocks=NUM_FULL + 2)
    world.files.update(world.hashes)
    assert world.copies.find(world.hashes)() == NUM_FULL
    assert world.copies.load(world.request, [], world.hashes)
