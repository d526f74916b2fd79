"""The state metadata of a step, made once and used by all layers with recurrent state; and copies
between rows and checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.context.state_slots import StateSlots
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.upload import upload_arrays
from dist_aclgraph.graphs.device_step import DeviceStep
from dist_aclgraph.ints import IntArray, unpack_ints
from dist_aclgraph.layers.state_metadata import PromptStates, StateMetadata
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.step import RankBatch


class StateSteps:
    """Makes the metadata of steps, and copies states. Owns constants only.

    Args:
        slots: the slots of this rank.
        passed: [num_rows + 1] int32, for each row the number of drafts accepted in its last step;
            None without drafts.
    """

    def __init__(self, npu: Npu, slots: StateSlots, passed: Tensor | None) -> None:
        self._npu = npu
        self._slots = slots
        self._passed = passed
        self._constants: dict[tuple[int, int], Tensor] = {}

    def of_graph(self, graph: BatchDescriptor, inputs: DeviceStep) -> StateMetadata:
        """Return the metadata of a full graph, from its static inputs."""
        bases, num_places = inputs.state_slots, graph.query_len
        assert bases is not None and num_places == self._slots.num_places
        slots, accepted = bases.unsqueeze(1), None
        if inputs.drafts is not None and self._passed is not None:
            places = torch.arange(num_places, dtype=torch.int32, device=bases.device)
            slots = slots + places * (slots > 0)  # All places of padding are in slot 0.
            accepted = self._passed.index_select(0, inputs.drafts.rows) + 1
        return self._metadata(slots, accepted)

    def of_step(self, inputs: HostStep) -> StateMetadata:
        """Return the metadata of any mixture of live requests.

        A request is direct if it verifies drafts, or without drafts, if it samples after its only
        token. The rows of a batch begin with the requests that decode.
        """
        lens = np.diff(inputs.query_ends, prepend=np.int32(0))
        logits = np.zeros(len(lens), np.int32)
        logits[inputs.sampled] = inputs.num_logits
        goes_on = inputs.kv_lens > lens
        num_places = self._slots.num_places
        is_direct = (lens == num_places) & (logits == num_places) & goes_on
        num_direct = int(np.logical_and.accumulate(is_direct).sum())
        rows, bases = inputs.rows[:num_direct], self._slots.bases(inputs.rows)
        places = np.arange(num_places, dtype=np.int32)
        arrays = [bases[:num_direct, None] + places, rows]
        has_prompts = num_direct < len(lens)
        if has_prompts:
            prompts = lens[num_direct:], bases[num_direct:], goes_on[num_direct:].astype(np.int32)
            arrays += prompts
        slots, sent_rows, *rest = upload_arrays(self._npu, arrays)
        accepted = None
        if self._passed is not None:
            accepted = self._passed.index_select(0, sent_rows) + 1
        found = None
        if has_prompts:
            ends = tuple(np.cumsum(lens[num_direct:]).tolist())
            found = PromptStates(
                query_lens=rest[0], query_ends=ends, slots=rest[1], goes_on=rest[2].bool()
            )
        return self._metadata(slots, accepted, found)

    def restore(self, batch: RankBatch, states: Sequence[Tensor]) -> None:
        """Copy checkpoints to the rows that start from them.

        Args:
            states: all tensors with slots.
        """
        if batch.restored:
            rows, checkpoints = unpack_ints(batch.restored, 2).T
            self._copy(states, self._slots.checkpoints(checkpoints), self._slots.bases(rows))

    def keep(self, batch: RankBatch, states: Sequence[Tensor]) -> None:
        """Copy rows to checkpoints, after the step."""
        if batch.kept:
            rows, checkpoints = unpack_ints(batch.kept, 2).T
            self._copy(states, self._slots.bases(rows), self._slots.checkpoints(checkpoints))

    def _copy(self, states: Sequence[Tensor], sources: IntArray, targets: IntArray) -> None:
        index = self._npu.upload(np.stack([sources, targets]).astype(np.int64))
        for tensor in states:
            tensor.index_copy_(0, index[1], tensor.index_select(0, index[0]))

    def _metadata(
        self, slots: Tensor, accepted: Tensor | None, prompts: PromptStates | None = None
    ) -> StateMetadata:
        n = len(slots)
        return StateMetadata(
            slots=slots,
            lens=self._constant(n, self._slots.num_places),
            accepted=self._constant(n, 1) if accepted is None else accepted,
            prompts=prompts,
        )

    def _constant(self, length: int, value: int) -> Tensor:
        """Return [length] int32 with equal values, made once. Graphs contain its address."""
        if (length, value) not in self._constants:
            shape = (length,)
            made = torch.full(shape, value, dtype=torch.int32, device=self._npu.device)
            self._constants[length, value] = made
        return self._constants[length, value]
