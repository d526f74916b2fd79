"""Law: a worker that derives a step's inputs from its previous step gets the same inputs as a new
worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.arrays.ints import pack_ints, unpack_ints
from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.engine.input_batch import InputBatch
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.step import RankBatch, RowSampling, RowStart

ROWS, MAX_LEN, BLOCK, VOCAB = 4, 48, 4, 100
LATEST = 40
PLACES = {
    "whole": ContextPlace(Shards(BLOCK)),
    "sharded": ContextPlace(Shards(BLOCK, 2, 2), 1),
}


@dataclass
class Row:
    """A running request."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    known: int = 0  # number of tokens that the worker has received

    def start(self, row: int) -> RowStart:
        known = pack_ints(self.tokens[: self.known])
        return RowStart(row, known, pack_ints(self.blocks), RowSampling())


@dataclass
class Group:
    """Makes random steps, in place of a scheduler with one or two steps in flight."""

    data: st.DataObject
    tokens_per_block: int
    num_drafts: int
    rows: dict[int, Row] = field(default_factory=dict)
    next_block: int = 2

    def draw(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def blocks_for(self, num_tokens: int, already: int = 0) -> list[int]:
        """Return ids of the blocks that a request with ``already`` blocks still needs; sometimes
        one id more.
        """
        wanted = min(num_tokens + self.draw(0, 1) * self.tokens_per_block, MAX_LEN)
        count = max(0, -(-wanted // self.tokens_per_block) - already)
        self.next_block += count
        ids = range(self.next_block - count, self.next_block)
        # Neighbouring ids are swapped, so that a request's block ids are not consecutive.
        return [id + 1 if id % 2 else id - 1 for id in ids]

    def decide(self) -> RankBatch:
        """Return a random next step. In most steps, all requests decode."""
        started, appended, blocks, records = [], [], [], []
        steady = self.draw(0, 4) > 0 and bool(self.rows)
        for index in range(ROWS):
            actions = ["-"] * 9 + ["again"] if steady else ["start", "end", "-"]
            action = self.data.draw(st.sampled_from(actions))
            if action == "start" or (action == "again" and index in self.rows):
                # "start": a new request gets the row. "again": the row's request starts again at
                # the position that it had reached.
                old = self.rows.get(index)
                length = self.draw(1, 9) if action == "start" or old is None else len(old.tokens)
                tokens = [self.draw(0, VOCAB - 1) for _ in range(length)]
                computed = self.draw(0, length - 1) if action == "start" else length - 1
                row = Row(tokens, self.blocks_for(len(tokens)), computed, len(tokens))
                self.rows[index] = row
                started.append(row.start(index))
            elif action == "end":
                self.rows.pop(index, None)
        is_late = self.draw(0, 3) > 0  # the last step's tokens have not reached the host yet
        order = list(self.rows) if steady else self.data.draw(st.permutations(list(self.rows)))
        for index in order:
            row = self.rows[index]
            late = int(is_late and row.computed == len(row.tokens) - 1)
            if (known := max(row.known, len(row.tokens) - late)) > row.known:
                appended += [x for token in row.tokens[row.known : known] for x in (index, token)]
                row.known = known
            left = len(row.tokens) - row.computed
            if left == 0 or len(row.tokens) + self.num_drafts >= MAX_LEN:
                continue
            length = left if steady else self.draw(1, left)
            added = self.blocks_for(row.computed + length, len(row.blocks))
            for block in added:
                blocks += [index, len(row.blocks), block]
                row.blocks.append(block)
            records += [index, row.computed, length, int(length == left)]
            row.computed += length
            if length == left:
                row.tokens.append(self.draw(0, VOCAB - 1))
        return RankBatch(pack_ints(records), pack_ints(appended), pack_ints(blocks), tuple(started))

    def from_nothing(self, place: ContextPlace, sampled: HostStep | None) -> InputBatch:
        """Return a new batch with all rows, and with the rows that the last step has sampled."""
        batch = InputBatch(ROWS, MAX_LEN, place, LATEST, self.num_drafts)
        starts = tuple(row.start(index) for index, row in self.rows.items())
        batch.apply(RankBatch(b"", started=starts))
        if sampled is not None:
            batch.note_samples(sampled)
        return batch


@pytest.mark.parametrize(("where", "num_drafts"), [("whole", 0), ("sharded", 0), ("whole", 2)])
@given(data=st.data())
def test_a_step_equals_the_step_of_a_new_batch(
    where: str, num_drafts: int, data: st.DataObject
) -> None:
    place = PLACES[where]
    group = Group(data, place.shards.tokens_per_block, num_drafts)
    batch = InputBatch(ROWS, MAX_LEN, place, LATEST, num_drafts)
    last: HostStep | None = None
    for _ in range(data.draw(st.integers(1, 24))):
        plan = group.decide()
        records = unpack_ints(plan.scheduled, 4)

        batch.apply(plan)
        found = batch.step_inputs(records)

        wanted = group.from_nothing(place, last).step_inputs(records)
        assert_same(found, wanted)
        batch.note_samples(found)
        if found.num_samples:
            last = found


def assert_same(found: HostStep, wanted: HostStep) -> None:
    for name in (each.name for each in fields(HostStep)):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype, name
            assert ours.tolist() == theirs.tolist(), name
        elif theirs is not None and name == "drafts":
            assert ours.slots.tolist() == theirs.slots.tolist()
        else:
            assert ours is theirs is None, name


def test_a_steady_step_shares_what_does_not_change() -> None:
    batch = InputBatch(ROWS, MAX_LEN, PLACES["whole"], LATEST)
    starts = tuple(
        RowStart(row, pack_ints([1, 2]), pack_ints([1 + row]), RowSampling()) for row in range(ROWS)
    )
    batch.apply(RankBatch(b"", started=starts))
    steps = []
    for computed in range(1, 4):
        records = np.array([[row, computed, 1, 1] for row in range(ROWS)], np.int32)
        steps.append(batch.step_inputs(records))
        batch.note_samples(steps[-1])
        batch.apply(RankBatch(b""))

    _, last, step = steps

    same = ("rows", "token_ids", "query_ends", "block_table", "sampled", "sampled_rows", "places")
    assert all(getattr(step, name) is getattr(last, name) for name in same)
    assert step.positions.tolist() == [3] * ROWS
