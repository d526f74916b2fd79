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
from dist_aclgraph.layers.state_metadata import (
    DirectArrays,
    DirectLayout,
    DirectStates,
    PromptStates,
    StateMetadata,
    direct_arrays,
    prompt_arrays,
)
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.step import RankBatch

DIRECT_ARRAYS = len(DirectArrays._fields)


class StateSteps:
    """Makes the metadata of steps, and copies states. Owns the constants of graphs only.

    Args:
        slots: the slots of this rank.
        width: number of tokens that the convolution sees.
        passed: [num_rows + 1] int32, for each row the number of drafts accepted in its last step;
            None without drafts.
    """

    def __init__(self, npu: Npu, slots: StateSlots, width: int, passed: Tensor | None) -> None:
        self._npu = npu
        self._slots = slots
        self._width = width
        self._passed = passed
        self._layouts: dict[int, DirectLayout] = {}
        self._ones: dict[int, Tensor] = {}

    def of_graph(self, graph: BatchDescriptor, inputs: DeviceStep) -> StateMetadata:
        """Return the metadata of a full graph, from its static inputs."""
        bases, num_places = inputs.state_slots, self._slots.num_places
        assert bases is not None and graph.query_len == num_places
        n = len(bases)
        if n not in self._layouts:
            layout = DirectLayout.of_graph(n, num_places, self._width, self._npu.device)
            self._layouts[n] = layout
        rows = None if inputs.drafts is None else inputs.drafts.rows
        accepted = self._accepted(n, rows)
        return StateMetadata(direct=DirectStates.of_windows(bases, accepted, self._layouts[n]))

    def of_step(self, inputs: HostStep) -> StateMetadata:
        """Return the metadata of any mixture of live requests.

        A request is direct if it verifies drafts, or without drafts, if it samples after its only
        token. A batch begins with the requests that decode.
        """
        lengths = np.diff(inputs.query_ends, prepend=np.int32(0))
        logits = np.zeros(len(lengths), np.int32)
        logits[inputs.sampled] = inputs.num_logits
        goes_on = inputs.kv_lens > lengths
        num_places = self._slots.num_places
        is_direct = (lengths == num_places) & (logits == num_places) & goes_on
        n = int(np.logical_and.accumulate(is_direct).sum())
        bases = self._slots.bases(inputs.rows)
        arrays: list[IntArray] = []
        if n:
            arrays += [inputs.rows[:n], *direct_arrays(bases[:n], lengths[:n], self._width)]
        if n < len(lengths):
            left = bases[n:], bases[n:], lengths[n:], goes_on[n:].astype(np.int32)
            arrays += prompt_arrays(*left, self._width)
        sent = upload_arrays(self._npu, arrays)
        direct = prompts = None
        if n:
            rows, *places = sent[: 1 + DIRECT_ARRAYS]
            direct = DirectStates.of_step(places, self._accepted(n, rows), num_places)
            sent = sent[1 + DIRECT_ARRAYS :]
        if sent:
            prompts = PromptStates.of_step(sent, np.cumsum(lengths[n:]).tolist())
        return StateMetadata(direct=direct, prompts=prompts)

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

    def _accepted(self, n: int, rows: Tensor | None) -> Tensor:
        """Return for each of ``n`` requests 1 + the number of its drafts accepted last, [n] int32.

        Args:
            rows: [n] int32; None in a graph without drafts.
        """
        if self._passed is not None and rows is not None:
            return self._passed.index_select(0, rows) + 1
        if n not in self._ones:
            self._ones[n] = torch.ones(n, dtype=torch.int32, device=self._npu.device)
        return self._ones[n]
