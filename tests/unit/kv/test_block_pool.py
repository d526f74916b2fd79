"""No operation loses a block, or allocates a block that is already allocated. Blocks are reused in
the documented order.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.errors import KVCacheError, OutOfBlocksError
from dist_aclgraph.kv.block_pool import DUMMY_BLOCK, BlockPool, hash_block


def chain(*blocks: list[int]) -> list[bytes]:
    hashes = [b""]
    for tokens in blocks:
        hashes.append(hash_block(hashes[-1], pack_ints(tokens)))
    return hashes[1:]


class PoolMachine(RuleBasedStateMachine):
    """Several holders allocate and free blocks. Reference counts are compared with those of a
    simple model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, block_size=4)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # hashes that were stored for blocks

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        before = self.pool.num_free
        if count > before:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            assert self.pool.num_free == before
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        used = {block for holder in self.holders for block in holder}
        assert not used & set(blocks)
        for block in blocks:
            self.content.pop(block, None)
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), name=st.integers(0, 5))
    def store(self, data, name: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        for block in holder[:1]:
            block_hash = hash_block(b"", pack_ints([name]))
            self.pool.store(block, block_hash)
            if self.pool.hash_of(block) is not None:
                self.content.setdefault(block, block_hash)

    @rule(name=st.integers(0, 5))
    def share(self, name: int) -> None:
        block_hash = hash_block(b"", pack_ints([name]))
        found = self.pool.match([block_hash])
        free = self.pool.num_free_without(found)
        self.pool.share(found)
        assert self.pool.num_free == free
        assert all(self.content[block] == block_hash for block in found)
        self.holders.append(found)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data) -> None:
        holder = data.draw(st.sampled_from(range(len(self.holders))))
        self.pool.free(self.holders.pop(holder))

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.holders.clear()
        self.content.clear()
        assert self.pool.num_cached == 0

    @invariant()
    def free_and_used_are_all(self) -> None:
        counts = Counter(block for holder in self.holders for block in holder)
        assert self.pool.num_used == len(counts)
        assert self.pool.num_free + self.pool.num_used == 8
        assert counts[DUMMY_BLOCK] == 0
        assert all(self.pool._ref_counts[block] == counts[block] for block in range(9))


TestPool = PoolMachine.TestCase


def test_equal_beginnings_hash_equal_and_later_blocks_depend_on_earlier_ones() -> None:
    one, two = chain([1, 2], [3, 4]), chain([1, 2], [3, 5])

    assert one[0] == two[0]
    assert one[1] != two[1]
    assert chain([9, 9], [3, 4])[1] != one[1]


def test_a_prefix_survives_its_request_until_blocks_run_out() -> None:
    pool = BlockPool(4, block_size=2)
    hashes = chain([1, 2], [3, 4])
    blocks = pool.allocate(2)
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.store(block, block_hash)
    pool.free(blocks)

    assert pool.match(hashes) == blocks
    pool.allocate(1)  # takes the block that has no cached contents
    assert pool.match(hashes) == blocks
    pool.allocate(1)  # evicts the last block of the prefix
    assert pool.match(hashes) == blocks[:1]


def test_the_least_recently_freed_prefix_is_evicted_first() -> None:
    pool = BlockPool(3, block_size=1)
    first, second = pool.allocate(2)
    pool.store(first, chain([1])[0])
    pool.store(second, chain([2])[0])
    pool.free([second])
    pool.free([first])
    pool.share([second])
    pool.free([second])

    assert pool.allocate(1) == [first]


def test_the_first_block_of_a_hash_wins() -> None:
    pool = BlockPool(4, block_size=1)
    first, second = pool.allocate(2)
    pool.store(first, chain([1])[0])
    pool.store(second, chain([1])[0])

    assert pool.match(chain([1])) == [first]
    assert pool.hash_of(second) is None


def test_without_a_prefix_cache_nothing_is_found() -> None:
    pool = BlockPool(3, block_size=1, prefix_cache=False)
    pool.store(pool.allocate(1)[0], chain([1])[0])

    assert pool.match(chain([1])) == []


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.free([1]),
        lambda pool: pool.share([1]),
        lambda pool: pool.store(1, b"x"),
        lambda pool: BlockPool(1, 16),
    ],
)
def test_misuse_is_refused(misuse) -> None:
    with pytest.raises(KVCacheError):
        misuse(BlockPool(3, block_size=1))


def test_where_shared_blocks_count_they_are_used_once_for_each_reference() -> None:
    pool = BlockPool(6, block_size=4, counts_shared=True)
    first = pool.allocate(2)
    pool.store(first[0], b"h")

    assert pool.num_free_without([first[0]]) == 2
    pool.share([first[0]])
    assert (pool.num_used, pool.num_free) == (3, 2)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(3)
    pool.free([first[0]])
    pool.free(first)
    assert (pool.num_used, pool.num_free) == (0, 5)
