"""Law: sampling parameters of earlier steps, which stay on the device, never change the tokens of
later steps.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.arrays.ints import IntArray, pack_ints, unpack_ints
from dist_aclgraph.engine.input_batch import InputBatch
from dist_aclgraph.engine.sampling.sampling_places import KnownPlaces
from dist_aclgraph.engine.sampling.sampling_table import SamplingTable
from dist_aclgraph.engine.step_output import ComingOutput, StepOutput
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.step import RankBatch, RowSampling
from tests.engine.steps.test_going_on import LATEST, MAX_LEN, PLACES, ROWS, VOCAB, Group
from tests.laws import examples

PLAIN, RANDOM = RowSampling(), RowSampling(temperature=1.5, seed=3)
ALONE = [
    PLAIN,
    RANDOM,
    RowSampling(temperature=1.5, seed=4),
    RowSampling(temperature=0.5, seed=3),
    RowSampling(temperature=1.5, seed=3, top_p=0.3),
    RowSampling(temperature=1.5, seed=3, top_k=2),
    RowSampling(temperature=1.5, seed=3, top_k=3, top_p=0.6, logprobs=2),
    RowSampling(temperature=1.5, seed=3, min_p=0.5),
    RowSampling(logprobs=1),
    RowSampling(num_prompt_tokens=3, min_tokens=6, suppressed=tuple(range(0, VOCAB, 2))),
    RowSampling(biased=pack_ints([1, 3]), biases=np.array([9, -9], "<f4").tobytes()),
    RowSampling(temperature=1.5, seed=3, allowed=pack_ints([2, 5])),
]
PENALISED = [
    RowSampling(repetition_penalty=3.0, num_prompt_tokens=1),
    RowSampling(presence_penalty=1.9, frequency_penalty=0.5, num_prompt_tokens=1),
    RowSampling(temperature=1.0, seed=5, repetition_penalty=1.5, num_prompt_tokens=2),
]


class Worker:
    """The part of a worker that samples tokens, with two steps in flight."""

    def __init__(self, npu: Any, num_drafts: int) -> None:
        self._npu, self._num_places = npu, num_drafts + 1
        self.batch = InputBatch(ROWS, MAX_LEN, PLACES["whole"], LATEST, num_drafts)
        self.output = StepOutput(npu, self.batch, ROWS, num_drafts, VOCAB, torch.float32, 2)

    def launch(self, plan: RankBatch, step: HostStep, seed: int, latest: IntArray) -> ComingOutput:
        """Queue the sampling of a step.

        Args:
            seed: seed of the step's random logits.
            latest: the tokens that the previous step sampled, [num_samples of that step].
        """

        def tokens_at(references: IntArray) -> torch.Tensor:
            tokens: torch.Tensor = self._npu.upload(latest[references + LATEST])
            return tokens

        if self._num_places == 1:
            self.output.count_tokens(plan, step, tokens_at)
        n = step.num_samples * self._num_places
        chance = np.random.default_rng(seed)
        logits = self._npu.upload(chance.normal(0, 2, (n, VOCAB)).astype(np.float32))
        tokens = logits.argmax(-1).int()
        special = self.output.choose_special(step, logits, tokens)
        return self.output.queue(step.num_samples, tokens, logits.amax(-1), None, None, special)

    def read(self, coming: ComingOutput) -> tuple[Any, ...]:
        got = self.output.read(coming, lambda done: None)
        return got.token_ids.tolist(), got.logprobs

    def abort(self) -> None:
        """Overwrite the sampling parameters on the device. An abort can destroy them."""
        self._npu.synchronize()
        for tensor in tensors_of((self.output._known._places, self.output._counts._last)):
            tensor.fill_(1)
        self.output.forget()


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for one in value for tensor in tensors_of(one)]
    if hasattr(value, "__dataclass_fields__"):
        return tensors_of(tuple(getattr(value, each.name) for each in fields(value)))
    return []


@pytest.mark.parametrize(
    ("num_drafts", "samplings"), [(0, ALONE + PENALISED), (2, ALONE)], ids=["alone", "drafts"]
)
@examples(60)
@given(data=st.data())
def test_a_worker_with_earlier_steps_samples_like_a_new_worker(
    npu: Any, num_drafts: int, samplings: list[RowSampling], data: st.DataObject
) -> None:
    group = Group(data, PLACES["whole"].shards.tokens_per_block, num_drafts)
    worker, last = Worker(npu, num_drafts), None
    sampling: dict[int, RowSampling] = {}
    coming: list[tuple[Worker, ComingOutput, Worker, ComingOutput]] = []
    for _ in range(data.draw(st.integers(1, 14))):
        rows = () if last is None else last.sampled_rows.tolist()
        ended = 0  # any token id, for rows whose request has ended
        latest = [group.rows[row].tokens[-1] if row in group.rows else ended for row in rows]
        plan = group.decide()
        for start in plan.started:
            sampling[start.row] = data.draw(st.sampled_from(samplings))
        plan = with_sampling(plan, sampling)
        if data.draw(st.integers(0, 9)) == 0:
            worker.abort()
        records, seed = unpack_ints(plan.scheduled, 4), data.draw(st.integers(0, 999))
        worker.batch.apply(plan)
        step = worker.batch.step_inputs(records)
        fresh = Worker(npu, num_drafts)
        told = RankBatch(b"", started=tuple(row.start(i) for i, row in group.rows.items()))
        told = with_sampling(told, sampling)
        fresh.batch.apply(told)
        if last is not None:
            fresh.batch.note_samples(last)

        at = np.asarray(latest, np.int32)
        ours = worker.launch(plan, step, seed, at)
        theirs = fresh.launch(told, fresh.batch.step_inputs(records), seed, at)

        coming.append((worker, ours, fresh, theirs))
        worker.batch.note_samples(step)
        if step.num_samples:
            last = step
        if len(coming) == 2:
            assert_same(*coming.pop(0))
    for left in coming:
        assert_same(*left)


def with_sampling(plan: RankBatch, sampling: dict[int, RowSampling]) -> RankBatch:
    """Return a plan that starts rows with the sampling parameters ``sampling``."""
    started = tuple(
        msgspec.structs.replace(start, sampling=sampling[start.row]) for start in plan.started
    )
    return msgspec.structs.replace(plan, started=started)


def assert_same(worker: Worker, ours: ComingOutput, fresh: Worker, theirs: ComingOutput) -> None:
    assert worker.read(ours) == fresh.read(theirs)


def test_parameters_are_sent_when_they_change_and_not_else() -> None:
    sent: list[np.ndarray] = []

    def to_device(array: np.ndarray) -> torch.Tensor:
        sent.append(array)
        return torch.from_numpy(array)

    def num_sent(rows: list[int]) -> int:
        sent.clear()
        known.find(np.array(rows, np.int32))
        return len(sent)

    table = SamplingTable(ROWS)
    known = KnownPlaces(table, 1, VOCAB, to_device)
    assert num_sent([0, 1]) == 0
    table.set(0, RANDOM)
    table.set(1, PLAIN)
    assert num_sent([0, 1]) > 0
    assert num_sent([0, 1]) == 0
    assert num_sent([1, 0]) > 0
    table.set(1, RANDOM)
    assert num_sent([1, 0]) > 0
    assert num_sent([1, 0]) == 0
    known.forget()
    assert num_sent([1, 0]) > 0


def test_places_are_selected_only_if_the_step_has_other_places() -> None:
    table = SamplingTable(ROWS)
    for row, sampling in enumerate((RANDOM, RANDOM, PLAIN)):
        table.set(row, sampling)
    known = KnownPlaces(table, 2, VOCAB, torch.from_numpy)

    def where(*rows: int) -> list[int] | None:
        found = known.find(np.array(rows, np.int32))
        assert found is not None
        return None if found.where is None else found.where.tolist()

    assert where(1, 0) is None
    assert where(2, 0) == [2, 3]


def test_an_abort_forgets_the_rows_of_counted_tokens(npu: Any) -> None:
    worker = Worker(npu, 0)
    worker.output._counts.add(np.arange(2, dtype=np.int32), npu.upload(np.zeros(2, np.int32)))
    assert worker.output._counts._last is not None

    worker.output.forget()

    assert worker.output._counts._last is None
