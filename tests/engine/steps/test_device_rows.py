"""The lengths in tensors on the device equal the lengths that the host gives to other operators."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.attention_steps import AttentionSteps
from dist_aclgraph.graphs.device_step import DeviceStep
from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.draft_places import DraftPlaces
from dist_aclgraph.steps.host_step import NO_INTS, NO_STEP
from dist_aclgraph.steps.padding import GraphLens
from tests.engine.prompt_steps import prompt_step

PLACE = ContextPlace(Shards(16))
KIND: Any = SimpleNamespace(
    slot_dtype=torch.int64,
    takes_long_queries=True,
    ropes_written=False,
    reads_device_rows=True,
    chooses_keys=True,
)


@pytest.fixture
def steps(npu: Npu) -> AttentionSteps:
    return AttentionSteps(KIND, PLACE, npu)


def ints(npu: Npu, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(npu.device)


def assert_equal_to_those_of_the_host(metadata: AttentionMetadata) -> None:
    rows = metadata.on_device
    assert rows is not None
    assert rows.query_ends.tolist() == metadata.query_ends
    assert rows.kv_lens.tolist() == metadata.kv_lens
    assert rows.slots.tolist() == [[max(slot, 0)] for slot in metadata.written.tolist()]


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("iteration", [0, 1])
def test_of_a_graph_with_padding(
    npu: Npu, steps: AttentionSteps, query_len: int, iteration: int
) -> None:
    graph = BatchDescriptor(4 * query_len, 4, query_len, "FULL")
    kv_lens = np.array([40, query_len, 7], np.int32)  # the graph's fourth row is padding
    positions = [int(n) - query_len + i for n in kv_lens for i in range(query_len)]
    slots = [*range(100, 100 + len(positions)), *[-1] * query_len]
    padded = ints(npu, *positions, *[0] * query_len)
    inputs = DeviceStep(padded, padded, ints(npu, *slots), ints(npu, 1, 2, 3, 0)[:, None], padded)
    lens = GraphLens(PLACE, num_drafts=2).pad(graph, NO_INTS, kv_lens)

    metadata = steps.of_graph(graph, inputs, lens, None, iteration=iteration)

    assert_equal_to_those_of_the_host(metadata)


def test_of_a_graph_of_mixed_batches_are_its_inputs(npu: Npu, steps: AttentionSteps) -> None:
    graph = BatchDescriptor(8, 4, 0, "FULL")
    query_ends, kv_lens = np.array([1, 5], np.int32), np.array([40, 4], np.int32)
    lens = GraphLens(PLACE).pad(graph, query_ends, kv_lens)
    padded = ints(npu, *[0] * 8)
    slots = ints(npu, *range(100, 105), -1, -1, -1)
    ends, keys = ints(npu, *lens.query_ends), ints(npu, *lens.kv_lens[0])
    table = ints(npu, 1, 2, 0, 0)[:, None]
    inputs = DeviceStep(padded, padded, slots, table, padded, query_ends=ends, kv_lens=keys)

    metadata = steps.of_graph(graph, inputs, lens, None)

    assert_equal_to_those_of_the_host(metadata)


@pytest.mark.parametrize(("ends", "lens"), [([1, 2], [9, 1]), ([1, 20, 27], [30, 19, 40])])
def test_of_a_step(npu: Npu, steps: AttentionSteps, ends: list[int], lens: list[int]) -> None:
    table = np.ones((len(ends), 3), np.int32)
    slots = torch.arange(ends[-1]) + 16

    metadata = steps.of_step(*prompt_step(npu, ends, lens, table, slots))

    assert_equal_to_those_of_the_host(metadata)


def test_a_step_without_requests_has_none(npu: Npu, steps: AttentionSteps) -> None:
    empty = ints(npu)
    step = DeviceStep(empty, empty, empty, empty.view(0, 1), empty)

    metadata = steps.of_step(NO_STEP, step)

    assert metadata.is_idle and metadata.on_device is None


def test_of_drafts_after_a_mixed_step(npu: Npu, steps: AttentionSteps) -> None:
    at = np.array([[4, 5, 6], [30, 30, 30]], np.int32)
    drafts = DraftPlaces(*[NO_INTS] * 3, at, *[NO_INTS] * 3)
    written = ints(npu, 3, -1, 5, -1, -1, 8)

    metadata = steps.of_drafts(
        torch.from_numpy(at).to(npu.device),
        written,
        ints(npu, 1, 2)[:, None],
        replace(NO_STEP, drafts=drafts),
        ahead=1,
    )

    assert_equal_to_those_of_the_host(metadata)
