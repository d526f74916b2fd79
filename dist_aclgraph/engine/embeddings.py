"""Embeddings. A request can ask for the embedding of its prompt, which is the hidden state of the
prompt's last token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.input_batch import InputBatch
from dist_aclgraph.steps.host_step import HostStep


@dataclass(frozen=True)
class ComingEmbeddings:
    """Embeddings whose copy to the host is queued.

    Attributes:
        samples: [n], indices of the requests among the sampled requests.
        states: [n, hidden] float32, pinned.
    """

    samples: IntArray
    states: Tensor

    def read(self) -> dict[int, bytes]:
        """Return each request's embedding. The keys are indices of requests among the sampled
        requests.

        Call this after the copy has ended.
        """
        states = np.ascontiguousarray(self.states.numpy(), "<f4")
        return {i: row.tobytes() for i, row in zip(self.samples.tolist(), states, strict=True)}


def queue_embeddings(
    npu: Npu, batch: InputBatch, inputs: HostStep, hidden: Tensor, num_places: int
) -> ComingEmbeddings | None:
    """Queue a copy of this step's embeddings to the host. Return None if no request asks for an
    embedding.

    The host does not wait.

    Args:
        hidden: [num_samples * num_places, hidden], normalised hidden states of the tokens after
            which the step samples: ``num_places`` tokens of each request. At the end of a prompt,
            the first of these tokens is the prompt's last token.
    """
    if not batch.sampling.has_embeddings:
        return None
    wanted = batch.sampling.settings(inputs.sampled_rows)["embeds"]
    samples = np.flatnonzero(wanted).astype(np.int32)
    if not len(samples):
        return None
    states = hidden.index_select(0, npu.upload(samples * num_places)).float()
    landed = npu.pinned(tuple(states.shape), torch.float32)
    landed.copy_(states, non_blocking=True)
    return ComingEmbeddings(samples, landed)
