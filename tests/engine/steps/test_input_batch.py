"""The batch of running requests is compared with a simple implementation that uses lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.arrays.ints import pack_ints, unpack_ints
from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.engine.input_batch import InputBatch
from dist_aclgraph.steps.step import RankBatch, RowSampling, RowStart

ROWS, MAX_LEN, BLOCK, VOCAB = 4, 64, 16, 100
LATEST = 40
PLACE = ContextPlace(Shards(BLOCK))


class NaiveRows:
    """The simple implementation: lists of tokens and of blocks for each row."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}

    def slot(self, row: int, position: int) -> int:
        return self.blocks[row][position // BLOCK] * BLOCK + position % BLOCK


@given(st.data())
def test_steps_have_the_same_inputs_as_in_a_naive_model(data: st.DataObject) -> None:
    batch, naive, computed = InputBatch(ROWS, MAX_LEN, PLACE, LATEST), NaiveRows(), {}
    next_block = 1
    for _ in range(data.draw(st.integers(1, 8))):
        started, appended, blocks = [], [], []
        for row in range(ROWS):
            action = data.draw(st.sampled_from(["start", "append", "skip"]))
            if action == "start":
                prompt = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=20))
                ids = [next_block, next_block + 1]
                next_block += 2
                naive.tokens[row], naive.blocks[row], computed[row] = list(prompt), ids[:], 0
                started.append(RowStart(row, pack_ints(prompt), pack_ints(ids), RowSampling()))
            elif action == "append" and row in naive.tokens and len(naive.tokens[row]) < MAX_LEN:
                token = data.draw(st.integers(0, 99))
                naive.tokens[row].append(token)
                appended += [row, token]
                if len(naive.tokens[row]) > BLOCK * len(naive.blocks[row]):
                    blocks += [row, len(naive.blocks[row]), next_block]
                    naive.blocks[row].append(next_block)
                    next_block += 1
        scheduled = []
        for row in sorted(naive.tokens, key=lambda _: data.draw(st.integers(0, 99))):
            left = len(naive.tokens[row]) - computed[row]
            if left > 0:
                length = data.draw(st.integers(1, left))
                scheduled.append((row, computed[row], length, int(length == left)))
        if not scheduled:
            batch.apply(RankBatch(b"", pack_ints(appended), pack_ints(blocks), tuple(started)))
            continue
        flat = [value for record in scheduled for value in record]
        step = RankBatch(pack_ints(flat), pack_ints(appended), pack_ints(blocks), tuple(started))

        batch.apply(step)
        inputs = batch.step_inputs(unpack_ints(step.scheduled, 4))

        places = [(row, p) for row, at, length, _ in scheduled for p in range(at, at + length)]
        assert inputs.token_ids.tolist() == [naive.tokens[row][p] for row, p in places]
        assert inputs.positions.tolist() == [p for _, p in places]
        assert inputs.slots.tolist() == [naive.slot(row, p) for row, p in places]
        assert inputs.kv_lens.tolist() == [at + length for _, at, length, _ in scheduled]
        assert inputs.query_ends.tolist() == np.cumsum([r[2] for r in scheduled]).tolist()
        assert inputs.sampled_rows.tolist() == [row for row, _, _, logits in scheduled if logits]
        for i, (row, at, length, _) in enumerate(scheduled):
            width = -(-(at + length) // BLOCK)
            assert inputs.block_table[i, :width].tolist() == naive.blocks[row][:width]
            computed[row] = at + length


def test_several_tokens_of_one_row_are_appended_in_order() -> None:
    batch = InputBatch(ROWS, MAX_LEN, PLACE, LATEST)
    start = RowStart(1, pack_ints([7]), pack_ints([1]), RowSampling())
    appended = pack_ints([1, 8, 1, 9])

    batch.apply(RankBatch(b"", appended=appended, started=(start,)))

    assert batch.token_ids[1, :3].tolist() == [7, 8, 9]


def test_a_row_taken_over_forgets_its_sampling() -> None:
    batch = InputBatch(ROWS, MAX_LEN, PLACE, LATEST)
    for sampling in (RowSampling(temperature=1.0), RowSampling()):
        batch.apply(RankBatch(b"", started=(RowStart(0, pack_ints([1]), b"", sampling),)))

    assert batch.sampling.is_plain[0]
    assert batch.num_tokens[0] == 1


def test_drafts_are_named_by_row_and_index_and_go_to_the_dummy_block_at_the_end() -> None:
    batch = InputBatch(ROWS, MAX_LEN, PLACE, LATEST, num_drafts=2)
    long = RowStart(3, pack_ints(list(range(BLOCK - 1))), pack_ints([5]), RowSampling())
    prompt = RowStart(1, pack_ints([7, 8, 9]), pack_ints([2]), RowSampling())
    records = [3, BLOCK - 2, 3, 3, 1, 0, 3, 1]
    step = RankBatch(pack_ints(records), started=(long, prompt))

    batch.apply(step)
    inputs = batch.step_inputs(unpack_ints(step.scheduled, 4))

    drafts = [3 * 2 - LATEST, 3 * 2 + 1 - LATEST]
    assert inputs.token_ids.tolist() == [BLOCK - 2, *drafts, 7, 8, 9]
    assert inputs.next_tokens.tolist() == [0, 0, 0, 8, 9, 0]
    first = 5 * BLOCK + BLOCK - 2
    assert inputs.slots.tolist() == [first, first + 1, 0, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 2]
    assert inputs.places.tolist() == [0, 1, 2, 5, 5, 5]


def test_a_row_taken_over_has_no_blocks_of_its_predecessor() -> None:
    batch = InputBatch(ROWS, MAX_LEN, PLACE, LATEST, num_drafts=2)
    for blocks in ([4, 5, 6], [7]):
        start = RowStart(0, pack_ints([1]), pack_ints(blocks), RowSampling())
        batch.apply(RankBatch(b"", started=(start,)))

    assert batch.block_table[0].nonzero()[0].tolist() == [0]


def test_an_empty_batch_runs_nothing() -> None:
    batch = InputBatch(ROWS, MAX_LEN, PLACE, LATEST)
    batch.apply(RankBatch(b""))

    inputs = batch.step_inputs(unpack_ints(b"", 4))

    assert len(inputs.rows) == inputs.num_tokens == inputs.num_samples == 0
