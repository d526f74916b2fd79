"""Writes NaN into the slots of recurrent states that no request may read. So tests notice if a
request reads such a slot.
"""

from __future__ import annotations

import numpy as np
import torch

from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.scheduler.scheduler import Scheduler


def poison_stale_slots(runner: ModelRunner, scheduler: Scheduler) -> None:
    """Queue a task that writes NaN into every slot without a valid state.

    Such slots belong to rows without a request, to rejected drafts, and to checkpoints that are not
    stored. Checkpoints that a step in flight writes are not filled. If a step reads a filled slot
    before another step has written it, the logits are NaN, and ``runners.turn`` fails.
    """
    states, [rank] = runner._states, scheduler.ranks
    assert states is not None and rank.pool.checkpoints is not None
    slots, checkpoints, npu = states._slots, rank.pool.checkpoints, runner._npu
    rows = np.array([request.row for request in rank.running], np.int32)
    used = [*checkpoints._stored.values(), *checkpoints._begun.values()]
    # The valid state of a row is in its first slot if no draft of the row was accepted.
    kept = [slots.bases(rows), slots.checkpoints(np.array(used, np.int32))]
    is_kept = torch.zeros(slots.count, dtype=torch.bool, device=npu.device)
    is_kept.index_fill_(0, npu.upload(np.concatenate(kept).astype(np.int64)), True)
    if runner._drafts is not None and len(rows):
        passed = runner._drafts.passed.index_select(0, npu.upload(rows))
        is_kept.index_fill_(0, (npu.upload(slots.bases(rows)) + passed).long(), True)
    for tensor in runner.caches.state_tensors():
        tensor.masked_fill_(~is_kept.view(-1, *[1] * (tensor.dim() - 1)), torch.nan)
