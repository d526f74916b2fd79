"""Computes the log-probabilities of prompts. The logits of a chunk of a prompt are computed for
only a few tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.input_batch import InputBatch
from dist_aclgraph.engine.sampling.sampler import report_of
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.step import PromptLogprobs


@dataclass(frozen=True)
class ComingPrompt:
    """The log-probabilities of some tokens of a prompt. Their copy to the host is queued.

    Attributes:
        place: index of the request in the step. first: position of the first of these tokens.
        packed: [m, 2 * (1 + n) + 1] float32, pinned; columns as in ``ComingLogprobs.packed``.
        num_best: n, number of most probable tokens that are reported.
    """

    place: int
    first: int
    packed: Tensor
    num_best: int

    def read(self) -> PromptLogprobs:
        """Return the report. Call this after the copy has ended."""
        values = self.packed.numpy()
        width = values.shape[1] // 2 + 1  # number of columns with token ids or ranks
        ids = values[:, :width].view(np.int32)
        kept = 1 + self.num_best
        return PromptLogprobs(
            self.place,
            self.first,
            pack_ints(ids[:, :kept].ravel()),
            np.ascontiguousarray(values[:, width : width + kept], "<f4").tobytes(),
            pack_ints(ids[:, -1]),
        )


def queue_prompts(
    npu: Npu,
    batch: InputBatch,
    inputs: HostStep,
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    most: int,
) -> list[ComingPrompt]:
    """Compute the log-probabilities of prompts for the requests that ask for log-probabilities, and
    queue copies of the results to the host.

    All ranks of a tensor parallel group must call this for the same requests. The host does not
    wait.

    Args:
        hidden: [num_tokens, hidden], hidden states of the step's tokens.
        logits_of: returns [n, vocab] for [n, hidden]; all ranks must call it, in the same order.
        most: maximum number of tokens whose logits exist at the same time.
    """
    if not batch.sampling.reports_prompts:
        return []
    settings = batch.sampling.settings(inputs.rows)
    coming = []
    for place in np.flatnonzero(settings["prompt_logprobs"] >= 0).tolist():
        row, kv_len = int(inputs.rows[place]), int(inputs.kv_lens[place])
        query_end = int(inputs.query_ends[place])
        begin = kv_len - query_end + (int(inputs.query_ends[place - 1]) if place else 0)
        end = min(kv_len, int(settings["num_prompt_tokens"][place]) - 1)
        num_best = int(settings["prompt_logprobs"][place])
        if begin >= end:  # no token of the prompt follows these tokens
            continue
        # The request's token at position p has the index ``start + p`` among the step's tokens.
        # ``start`` can be negative, because earlier steps may have run the first tokens.
        start = query_end - kv_len
        states = torch.split(hidden[start + begin : start + end], most)
        tokens = npu.upload(batch.token_ids[row, begin + 1 : end + 1].copy())
        reports = [
            report_of(logits_of(part), chosen, num_best)
            for part, chosen in zip(states, torch.split(tokens, most), strict=True)
        ]
        packed = torch.cat(reports)
        landed = npu.pinned(tuple(packed.shape), packed.dtype)
        landed.copy_(packed, non_blocking=True)
        coming.append(ComingPrompt(place, begin + 1, landed, num_best))
    return coming
