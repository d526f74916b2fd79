"""Laws of sharded caches: each token is in exactly one shard, the lengths of all shards add up to
the request's length, and no two tokens share a slot.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.context.shards import FOREIGN_SLOT, Shards

INTERLEAVES = st.sampled_from([1, 2, 4, 8])


@st.composite
def shards(draw: st.DrawFn) -> Shards:
    interleave = draw(INTERLEAVES)
    block_size = interleave * draw(st.integers(1, 4))
    return Shards(block_size, draw(st.integers(1, 8)), interleave)


@given(shards(), st.integers(0, 300))
def test_every_token_has_one_owner_and_lengths_add_up(shards: Shards, length: int) -> None:
    owners = shards.owners(np.arange(length, dtype=np.int32))
    kept = np.bincount(owners, minlength=shards.count)
    lens = np.array([length], np.int32)
    assert [int(shards.lengths(lens, each)[0]) for each in range(shards.count)] == kept.tolist()


@given(shards(), st.integers(0, 300))
def test_a_shard_has_nothing_of_requests_up_to_its_first_position(
    shards: Shards, length: int
) -> None:
    for each in range(shards.count):
        is_empty = shards.lengths(np.array([length], np.int32), each)[0] == 0
        assert is_empty == (length <= shards.first_position(each))


@given(shards(), st.integers(1, 200), st.randoms(use_true_random=False))
def test_a_shard_keeps_its_tokens_in_order_at_the_front_of_its_blocks(
    shards: Shards, length: int, random: np.random.Generator
) -> None:
    """So attention, which reads the slots of the block table up to the shard's length, reads
    exactly the shard's tokens.
    """
    num_blocks = -(-length // shards.tokens_per_block)
    ids = list(range(1, num_blocks + 1))
    random.shuffle(ids)
    table = np.array([ids], np.int32)
    positions = np.arange(length, dtype=np.int32)
    slots = shards.slots(table, np.zeros(length, np.int32), positions)
    owners = shards.owners(positions)
    for each in range(shards.count):
        local = np.arange(shards.lengths(np.array([length]), each)[0])
        wanted = table[0, local // shards.block_size] * shards.block_size
        assert slots[owners == each].tolist() == (wanted + local % shards.block_size).tolist()


@given(shards(), st.integers(1, 200))
def test_each_token_is_written_by_its_owner_alone(shards: Shards, length: int) -> None:
    table = np.arange(1, 2 + length // shards.tokens_per_block, dtype=np.int32)[None]
    positions = np.arange(length, dtype=np.int32)
    rows = np.zeros(length, np.int32)
    written = np.stack(
        [shards.slots_of(each, table, rows, positions) for each in range(shards.count)]
    )
    assert ((written >= 0).sum(0) == 1).all()
    assert written.max(0).tolist() == shards.slots(table, rows, positions).tolist()


@given(shards(), st.integers(1, 200))
def test_the_slot_on_any_shard_tells_the_whole_slot(shards: Shards, length: int) -> None:
    table = np.arange(1, 2 + length // shards.tokens_per_block, dtype=np.int32)[None]
    positions = np.arange(length, dtype=np.int32)
    at = table, np.zeros(length, np.int32), positions
    wanted = Shards(shards.tokens_per_block).slots(*at)
    for shard in range(shards.count):
        slots = shards.slots_of(shard, *at)
        found = np.where(slots < 0, FOREIGN_SLOT - slots, shards.whole_of(slots, shard))
        assert found.tolist() == wanted.tolist()
        assert shards.owners(wanted).tolist() == shards.owners(positions).tolist()


def test_positions_beyond_a_row_are_kept_in_the_dummy_block() -> None:
    shards = Shards(4, 2, 2)
    table = np.array([[3, 5]], np.int32)
    positions = np.array([0, 1, 2, 7, 8, 15, 16, 19], np.int32)
    slots = shards.slots(table, np.zeros(8, np.int32), positions)
    assert slots.tolist() == [12, 13, 12, 15, 20, 23, 0, 1]
