"""Makes the inputs of a step, for tests that run layers without a model runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.graphs.device_step import DeviceStep
from dist_aclgraph.steps.host_step import NO_STEP, HostStep


def prompt_step(
    npu: Npu, query_ends: Sequence[int], kv_lens: Sequence[int], table: IntArray, slots: Tensor
) -> tuple[HostStep, DeviceStep]:
    """Return the inputs of attention in a step, on the host and on the device.

    Args:
        table: block table, [num_reqs, num_blocks].
        slots: slot mapping, [num_tokens].
    """
    ends, lens = np.array(query_ends, np.int32), np.array(kv_lens, np.int32)
    query_lens = np.diff(ends, prepend=np.int32(0))
    starts = np.repeat(lens - ends, query_lens)
    positions = (np.arange(ends[-1]) + starts).astype(np.int32)
    host = replace(
        NO_STEP,
        rows=np.arange(len(ends), dtype=np.int32),
        token_ids=np.zeros(ends[-1], np.int32),
        positions=positions,
        query_ends=ends,
        kv_lens=lens,
        block_table=table,
    )
    on_device = [torch.from_numpy(x).to(npu.device) for x in (positions, table)]
    own_slots = slots.int().to(npu.device)
    return host, DeviceStep(own_slots, on_device[0], own_slots, on_device[1], own_slots)
