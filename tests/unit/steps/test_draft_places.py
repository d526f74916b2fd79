from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.steps.draft_places import draft_places

BLOCK_SIZE, MAX_BLOCKS, MAX_ROWS = 4, 5, 6


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
    """Draw a batch of rows, with the blocks that the rows need.

    In the batch, a row verifies drafts, ends its prompt, or is in the middle of its prompt.
    """
    k = draw(st.integers(1, 3))
    rows = draw(st.permutations(range(MAX_ROWS)))[: draw(st.integers(1, MAX_ROWS))]
    table = np.zeros((MAX_ROWS, MAX_BLOCKS), np.int32)
    records = []
    for row in rows:
        kind = draw(st.sampled_from(("verify", "end", "middle")))
        computed = draw(st.integers(0, BLOCK_SIZE * MAX_BLOCKS - 8))
        scheduled = k + 1 if kind == "verify" else draw(st.integers(1, 6))
        logits = {"verify": k + 1, "end": 1, "middle": 0}[kind]
        records.append((row, computed, scheduled, logits))
        num_blocks = draw(st.integers(computed // BLOCK_SIZE + 1, MAX_BLOCKS))
        table[row, :num_blocks] = 1 + row * MAX_BLOCKS + np.arange(num_blocks)
    may_draft = np.asarray(draw(st.lists(st.booleans(), min_size=MAX_ROWS, max_size=MAX_ROWS)))
    return np.asarray(records, np.int32), k, table, may_draft


@given(batches())
def test_places_are_the_last_tokens_of_each_request(
    batch: tuple[np.ndarray, int, np.ndarray, np.ndarray],
) -> None:
    records, k, table, may_draft = batch
    found = draft_places(records, k, table, ContextPlace(Shards(BLOCK_SIZE)), may_draft)

    end, index = 0, 0
    for row, computed, scheduled, logits in records.tolist():
        end += scheduled
        if not logits:
            continue
        assert found.rows[index] == row
        assert found.most[index] == (logits - 1 if may_draft[row] else 0)
        expected = list(range(end - logits, end))
        assert found.places[index].tolist() == expected + expected[-1:] * (k + 1 - logits)
        # The first position of a row is the position of the token at the row's first place.
        assert found.positions[index, 0] == computed + scheduled - logits
        index += 1
    assert index == len(found.rows)


@given(batches())
def test_slots_name_own_blocks_or_the_dummy(
    batch: tuple[np.ndarray, int, np.ndarray, np.ndarray],
) -> None:
    records, k, table, may_draft = batch
    found = draft_places(records, k, table, ContextPlace(Shards(BLOCK_SIZE)), may_draft)

    for row, first, slots in zip(found.rows, found.positions[:, 0], found.slots, strict=True):
        for position, slot in enumerate(slots.tolist(), int(first)):
            block = position // BLOCK_SIZE
            block_id = int(table[row, block]) if block < MAX_BLOCKS else 0
            assert slot == block_id * BLOCK_SIZE + position % BLOCK_SIZE
