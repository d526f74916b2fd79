"""Checkpoints of recurrent states: the slots to which states are copied, and the copies that are
replaced.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.errors import KVCacheError
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.checkpoints import Checkpoints

A, B, C = b"a", b"b", b"c"


def stored(checkpoints: Checkpoints, *hashes: bytes) -> list[int | None]:
    found = []
    for block_hash in hashes:
        found.append(checkpoints.begin(block_hash))
        checkpoints.store(block_hash)
    return found


def test_a_prompt_is_copied_at_every_interval_and_after_its_last_whole_block() -> None:
    checkpoints, position, found = Checkpoints(1, interval=4), 0, []
    while position < 150:
        position = checkpoints.next_position(position, 150, block_size=16)
        found.append(position)

    assert found == [64, 128, 144, 150]


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 20), st.integers(1, 5))
def test_positions_are_ends_of_blocks_before_the_last_token(
    computed: int, left: int, block_size: int, interval: int
) -> None:
    num_tokens = computed + left
    found = Checkpoints(1, interval).next_position(computed, num_tokens, block_size)

    assert computed < found <= num_tokens
    assert found == num_tokens or found % block_size == 0
    assert Checkpoints(0, interval).next_position(computed, num_tokens, block_size) == num_tokens


def test_the_longest_unused_checkpoint_is_given_on() -> None:
    checkpoints = Checkpoints(2, 1)
    first, second = stored(checkpoints, A, B)
    assert checkpoints.use(A) == first

    assert checkpoints.begin(C) == second
    assert checkpoints.longest([A, B]) == 1
    assert checkpoints.longest([B]) == 0


def test_a_begun_checkpoint_is_neither_found_nor_given_on_nor_begun_twice() -> None:
    checkpoints = Checkpoints(1, 1)
    checkpoint = checkpoints.begin(A)

    assert checkpoints.longest([A]) == 0
    assert checkpoints.begin(A) is None
    assert checkpoints.begin(B) is None
    checkpoints.drop(A)
    assert checkpoints.begin(B) == checkpoint


def test_a_stored_checkpoint_is_not_written_again() -> None:
    checkpoints = Checkpoints(2, 1)
    stored(checkpoints, A)

    assert checkpoints.begin(A) is None
    assert checkpoints.begin(B) is not None
    assert checkpoints.longest([A]) == 1


def test_a_prefix_needs_the_checkpoint_after_it_and_not_the_ones_before() -> None:
    checkpoints = Checkpoints(4, 1)
    stored(checkpoints, B)

    assert [checkpoints.longest(h) for h in ([A], [A, B], [A, B, C])] == [0, 2, 2]


@pytest.mark.parametrize("leave", ["evict", "condemn", "clear"])
def test_a_checkpoint_leaves_with_its_last_block(leave: str) -> None:
    checkpoints = Checkpoints(2, 1)
    pool = BlockPool(3, 4, checkpoints=checkpoints)
    first, second = pool.allocate(2)
    pool.store(first, A)
    pool.store(second, B)
    stored(checkpoints, A, B)
    if leave == "evict":
        pool.free([first, second])
        pool.allocate(1)  # evicts the later block first
    elif leave == "condemn":
        pool.condemn([second])
    else:
        pool.clear()

    assert checkpoints.longest([A, B]) == (0 if leave == "clear" else 1)
    assert len(checkpoints._stored) == (0 if leave == "clear" else 1)


@pytest.mark.parametrize(("count", "interval"), [(-1, 1), (1, 0)])
def test_impossible_numbers_are_refused(count: int, interval: int) -> None:
    with pytest.raises(KVCacheError):
        Checkpoints(count, interval)
