"""The inputs of a step that replays no full graph. Ranks that share experts pad their inputs to
equal shapes.
"""

from __future__ import annotations

import numpy as np

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.context.shards import PADDING_SLOT
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.upload import upload_arrays
from dist_aclgraph.graphs.device_step import DeviceStep, DraftInputs, SharedPlaces
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.step import RankPlan, StepSize


def padded_size(plan: RankPlan, inputs: HostStep) -> StepSize:
    """Return the size to which the step is padded. If ranks share experts, the result is the
    largest size of all ranks. Otherwise, the result is this rank's own size.

    Ranks that share experts must call the same collectives with equal shapes. Ranks that split a
    prompt always pad to the number of tokens of the rank with the most tokens.
    """
    if plan.exchange is not None:
        return plan.largest
    prompts = inputs.prompts
    num_tokens = inputs.num_tokens if prompts is None else prompts.split.num_tokens
    return StepSize(num_tokens, inputs.num_samples)


def upload_step(
    npu: Npu, inputs: HostStep, size: StepSize, spare_row: int, static: DeviceStep | None
) -> DeviceStep:
    """Send a step's integers to the device, in one transfer.

    Args:
        size: the size to which the step is padded (``padded_size``).
        spare_row: row of padding requests.
        static: the inputs of a piecewise graph, which were written before this call; None if the
            step is eager.
    """
    arrays, prompts = [inputs.places], inputs.prompts
    if static is None:
        n = size.num_tokens
        arrays += [_pad(inputs.token_ids, n, 0), _pad(inputs.positions, n, 0)]
        arrays += [_pad(inputs.slots, n, PADDING_SLOT), inputs.block_table]
    num_tokens = size.num_tokens if static is None else len(static.token_ids)
    drafts = inputs.drafts
    if drafts is not None:
        n = size.num_samples
        arrays += [
            _pad(inputs.next_tokens, num_tokens + 1, 0),
            _pad(drafts.rows, n, spare_row),
            _pad(drafts.most, n, 0),
            _pad(drafts.positions, n, 0),
            _pad(drafts.slots, n, PADDING_SLOT),
            _pad(inputs.places, n * drafts.positions.shape[1], 0),
            inputs.block_table[inputs.sampled],
        ]
    shared = None
    if prompts is not None:
        # Every rank must compute equally many rows of logits, even a rank that samples no request.
        num_places = size.num_samples * (1 if drafts is None else drafts.positions.shape[1])
        # ``landings``: indices of the tokens whose logits are needed. A token of another rank gets
        # the index ``num_tokens``, which no token of this rank has.
        landings = np.where(prompts.owners == prompts.rank, prompts.landings, num_tokens)
        arrays += [_pad(prompts.owners, num_places, prompts.rank), landings.astype(np.int32)]
    places, *rest = upload_arrays(npu, arrays)
    if prompts is not None:
        *rest, owners, landings_sent = rest
        shared = SharedPlaces(owners, landings_sent)
    if static is None:
        token_ids, positions, slots, block_table, *rest = rest
    else:
        token_ids, positions, slots = static.token_ids, static.positions, static.slots
        block_table = static.block_table[: len(inputs.rows)]
    if drafts is None:
        return DeviceStep(token_ids, positions, slots, block_table, places, shared=shared)
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
        shared,
    )


def _pad(array: IntArray, length: int, value: int) -> IntArray:
    missing = length - len(array)
    if missing == 0:
        return array
    padding = np.full((missing, *array.shape[1:]), value, dtype=np.int32)
    return np.concatenate([array, padding])
