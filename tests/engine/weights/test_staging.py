"""Arrays are copied to the device through pinned memory. Pinned memory is written again only after
the device has read it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dist_aclgraph.device.npu import external_event, runtime
from dist_aclgraph.device.staging import NUM_PARTS, PART_BYTES


@pytest.mark.parametrize("num_bytes", [64, PART_BYTES // 3 + 4, PART_BYTES, 2 * PART_BYTES])
def test_arrays_arrive_that_are_sent_while_the_device_is_busy(npu: Any, num_bytes: int) -> None:
    gate, opener = external_event(), runtime().Stream()
    gate.wait(runtime().current_stream())
    gate.reset(runtime().current_stream())
    arrays = [np.full(num_bytes // 4, value, np.int32) for value in range(4 * NUM_PARTS)]

    sent = [npu.upload(array) for array in arrays]
    gate.record(opener)

    for value, tensor in enumerate(sent):
        assert (tensor.cpu() == value).all()


def test_memory_is_used_again_only_when_it_was_read(npu: Any) -> None:
    size = PART_BYTES // 8
    many = [np.full(size, value, np.int32) for value in range(8 * NUM_PARTS)]

    sent = [npu.upload(array) for array in many]

    assert [tensor.cpu().unique().item() for tensor in sent] == list(range(len(many)))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(0, np.int32),
        np.array([True, False, True]),
        np.arange(12, dtype=np.int64).reshape(3, 4).T,
        np.float32(2.5) * np.ones((2, 3, 5), np.float32),
    ],
)
def test_an_upload_does_not_change_an_array(npu: Any, array: np.ndarray) -> None:
    sent = npu.upload(array)
    assert sent.device.type == "npu"
    torch.testing.assert_close(sent.cpu(), torch.from_numpy(np.ascontiguousarray(array)))
