"""The inputs of a step outside full graphs, padded where ranks that share experts must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dist_aclgraph.device.npu import Npu
from dist_aclgraph.graphs.device_step import DeviceStep, DraftInputs
from dist_aclgraph.ints import IntArray, unpack_ints
from dist_aclgraph.packing import pack_parts
from dist_aclgraph.steps.draft_places import PADDING_SLOT
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.step import StepPlan


@dataclass(frozen=True)
class StepSize:
    """What every rank pads its step to: tokens, and requests that are sampled."""

    num_tokens: int
    num_samples: int

    @classmethod
    def of(cls, plan: StepPlan, inputs: HostStep) -> StepSize:
        """Return this rank's own size, or that of the largest batch where experts are spread: all
        ranks then pass the same shapes, as often.
        """
        if plan.exchange is None:
            return cls(inputs.num_tokens, inputs.num_samples)
        batches = [unpack_ints(batch.scheduled, 4) for batch in plan.batches]
        return cls(
            max(int(records[:, 2].sum()) for records in batches),
            max(int((records[:, 3] > 0).sum()) for records in batches),
        )


def upload_step(
    npu: Npu, inputs: HostStep, size: StepSize, spare_row: int, static: DeviceStep | None
) -> DeviceStep:
    """Send a step's integers to the device, in one transfer.

    Args:
        size: what it is padded to.
        spare_row: row of padding requests.
        static: the inputs of a graph in pieces, which have been written; None for an eager step.
    """
    arrays = [inputs.places]
    if static is None:
        n = size.num_tokens
        arrays += [_pad(inputs.token_ids, n, 0), _pad(inputs.positions, n, 0)]
        arrays += [_pad(inputs.slots, n, PADDING_SLOT), inputs.block_table]
    num_tokens = size.num_tokens if static is None else len(static.token_ids)
    drafts = inputs.drafts
    if drafts is not None:
        n = size.num_samples
        arrays += [
            _pad(inputs.next_tokens, num_tokens, 0),
            _pad(drafts.rows, n, spare_row),
            _pad(drafts.most, n, 0),
            _pad(drafts.positions, n, 0),
            _pad(drafts.slots, n, PADDING_SLOT),
            _pad(inputs.places, n * drafts.positions.shape[1], 0),
            inputs.block_table[inputs.sampled],
        ]
    places, *rest = _upload(npu, arrays)
    if static is None:
        token_ids, positions, slots, block_table, *rest = rest
    else:
        token_ids, positions, slots = static.token_ids, static.positions, static.slots
        block_table = static.block_table[: len(inputs.rows)]
    if drafts is None:
        return DeviceStep(token_ids, positions, slots, block_table, places)
    next_tokens, *fields, draft_table = rest
    return DeviceStep(
        token_ids,
        positions,
        slots,
        block_table,
        places,
        DraftInputs(*fields),
        next_tokens,
        draft_table,
    )


def _pad(array: IntArray, length: int, value: int) -> IntArray:
    missing = length - len(array)
    if missing == 0:
        return array
    padding = np.full((missing, *array.shape[1:]), value, dtype=np.int32)
    return np.concatenate([array, padding])


def _upload(npu: Npu, arrays: Sequence[IntArray]) -> list[Tensor]:
    """Send arrays in one copy; return them on the device, each on an aligned place."""
    parts, size = pack_parts(array.size for array in arrays)
    packed = np.zeros(size, np.int32)
    for part, array in zip(parts, arrays, strict=True):
        packed[part] = array.ravel()
    flat = npu.upload(packed)
    return [flat[part].view(array.shape) for part, array in zip(parts, arrays, strict=True)]
