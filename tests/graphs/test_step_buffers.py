"""Law: the input buffers of graphs contain the inputs of the last step, whatever was written
before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.device.npu import external_event, runtime
from dist_aclgraph.graphs.device_step import DeviceStep
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.host_step import NO_STEP, HostStep
from tests import laws
from tests.graphs.attention_rows import MAX_BLOCKS, make_buffers
from tests.plans import decode_graph, pieces

BUCKETS = (2, 4, 8)
COLUMNS = ("token_ids", "positions", "slots", "places")


def draw_array(data: st.DataObject, *shape: int) -> IntArray:
    seed = data.draw(st.integers(0, 99))
    return np.random.default_rng(seed).integers(0, 50, shape, dtype=np.int32)


def draw_step(data: st.DataObject, most: int, last: HostStep) -> HostStep:
    """Draw a step of at most ``most`` requests. Some of its arrays can be arrays of ``last``."""
    goes_on = data.draw(st.booleans()) and 0 < len(last.token_ids) <= most
    n = len(last.token_ids) if goes_on else data.draw(st.integers(1, most))
    fresh: dict[str, Any] = {name: draw_array(data, n) for name in COLUMNS}
    fresh["block_table"] = draw_array(data, n, data.draw(st.integers(1, MAX_BLOCKS)))
    shared = data.draw(st.sets(st.sampled_from(sorted(fresh)))) if goes_on else set()
    return replace(last, **{name: value for name, value in fresh.items() if name not in shared})


def padded(values: IntArray, size: int, padding: int) -> list[int]:
    return values.tolist() + [padding] * (size - len(values))


def assert_has(inputs: DeviceStep, step: HostStep, bucket: int) -> None:
    for name, padding in zip(COLUMNS, (0, 0, -1, 0), strict=True):
        wanted = padded(getattr(step, name), bucket, padding)
        assert getattr(inputs, name).cpu().tolist() == wanted, name
    live, width = step.block_table.shape
    table = inputs.block_table.cpu().numpy()
    assert table[:live, :width].tolist() == step.block_table.tolist()
    assert not table[:live, width:].any(), "a mask hides these blocks, but not NaN in them"
    assert not table[live:].any()


def test_only_rows_between_the_first_and_the_last_change_are_sent(npu: Any) -> None:
    buffers, graph = make_buffers(npu), decode_graph(8)
    table = np.arange(1, 7, dtype=np.int32).repeat(2).reshape(6, 2)
    one = np.ones(6, np.int32)
    step = replace(NO_STEP, **dict.fromkeys(COLUMNS, one), block_table=table)
    buffers.write(graph, step)
    sent = buffers.inputs(graph).block_table
    sent.fill_(99)

    buffers.write(graph, replace(step, block_table=np.add(table, [[0], [0], [1], [0], [1], [0]])))
    assert sent[:, 0].tolist() == [99, 99, 4, 4, 6, 99, 99, 99]

    buffers.write(graph, replace(step, **dict.fromkeys(COLUMNS, one[:4]), block_table=table[:4]))
    assert sent[:, 0].tolist() == [99, 99, 3, 4, 0, 0, 99, 99]

    buffers.forget()
    buffers.write(graph, replace(step, block_table=table * [[0], [1], [1], [1], [1], [1]]))
    assert sent[:, 0].tolist() == [0, 2, 3, 4, 5, 6, 0, 0]


@laws.examples(100)
@given(data=st.data())
def test_the_device_has_the_last_step_whatever_was_written_before(
    npu: Any, data: st.DataObject
) -> None:
    buffers, step = make_buffers(npu, BUCKETS[-1]), NO_STEP
    for _ in range(data.draw(st.integers(1, 8))):
        bucket = data.draw(st.sampled_from(BUCKETS))
        graph = decode_graph(bucket)
        step = draw_step(data, bucket, step)
        if data.draw(st.integers(0, 5)) == 0:  # after an abort, device memory is undefined
            view = buffers.inputs(decode_graph(BUCKETS[-1]))
            for tensor in (view.block_table, view.token_ids, view.slots):
                tensor.fill_(77)
            buffers.forget()

        buffers.write(graph, step)
        npu.synchronize()

        assert_has(buffers.inputs(graph), step, bucket)


@laws.examples(60)
@given(data=st.data())
def test_each_of_two_steps_in_flight_has_its_own_inputs(npu: Any, data: st.DataObject) -> None:
    buffers, step = make_buffers(npu, BUCKETS[-1], steps_in_flight=2), NO_STEP
    device, opener = runtime().current_stream(), runtime().Stream()
    gates: list[Any] = []  # before each step, the device waits for the step's event
    queued: list[tuple[DeviceStep, HostStep, int]] = []
    try:
        for _ in range(data.draw(st.integers(1, 8))):
            if len(gates) >= 2:
                gates[-2].record(opener)
            gates.append(external_event())
            gates[-1].wait(device)
            gates[-1].reset(device)
            bucket = data.draw(st.sampled_from(BUCKETS))
            graph = data.draw(st.sampled_from((decode_graph, pieces)))(bucket)
            step = draw_step(data, bucket, step)

            buffers.write(graph, step)

            view = buffers.inputs(graph)
            names = (*COLUMNS, "block_table")
            seen = replace(view, **{name: getattr(view, name).clone() for name in names})
            queued.append((seen, step, bucket))
    finally:
        for gate in gates[-2:]:
            gate.record(opener)
        npu.synchronize()
    for seen, wanted, bucket in queued:
        assert_has(seen, wanted, bucket)


@pytest.mark.parametrize("graph", [decode_graph(4), pieces(4)], ids=str)
def test_a_step_that_is_larger_than_its_graph_is_refused(npu: Any, graph: BatchDescriptor) -> None:
    buffers, five = make_buffers(npu), np.arange(5, dtype=np.int32)

    with pytest.raises(AssertionError, match="must fit into its graph"):
        buffers.write(graph, replace(NO_STEP, token_ids=five, positions=five, slots=five))
