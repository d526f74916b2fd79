"""Makes the state metadata of a step once, for all layers with recurrent state. Also copies
recurrent states between rows and checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray, unpack_ints
from dist_aclgraph.context.state_slots import StateSlots
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.upload import upload_arrays
from dist_aclgraph.graphs.device_step import DeviceStep
from dist_aclgraph.layers.state_metadata import (
    DirectLayout,
    DirectStates,
    PromptStates,
    StateMetadata,
    prompt_arrays,
)
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.host_step import HostStep


class StateSteps:
    """Makes the metadata of steps, and copies states. Owns only constants.

    Args:
        passed: [num_rows + 1] int32, for each row the number of drafts accepted in its last step;
            None if the deployment uses no drafts.
        poisons: whether a row's state is overwritten with NaN before a new request gets the row. If
            true, the strict emulator finds steps that wrongly use the state of an earlier request.
    """

    def __init__(
        self, npu: Npu, slots: StateSlots, passed: Tensor | None, width: int, *, poisons: bool
    ) -> None:
        self._npu = npu
        self._poisons = poisons
        self._slots = slots
        self._passed = passed
        self._width = width
        self._layouts: dict[int, DirectLayout] = {}

    def of_graph(self, graph: BatchDescriptor, inputs: DeviceStep) -> StateMetadata:
        """Return the metadata of a full graph, from its static inputs."""
        bases = inputs.state_slots
        assert bases is not None and graph.query_len == self._slots.num_places
        rows = None if inputs.drafts is None else inputs.drafts.rows
        return StateMetadata(direct=self._direct(bases, rows))

    def of_step(self, inputs: HostStep) -> StateMetadata:
        """Return the metadata of a step without padding. The step may contain any mixture of
        requests.

        A request is called direct if it updates its state token by token. With drafts, a request is
        direct if it verifies drafts. Without drafts, a request is direct if it runs one token. A
        request that comes from another group first runs the output tokens that it already has,
        without sampling. The request is direct in these steps, so that both groups round its state
        in the same way. The requests that decode are the first requests of a batch.
        """
        lens = np.diff(inputs.query_ends, prepend=np.int32(0))
        logits = np.zeros(len(lens), np.int32)
        logits[inputs.sampled] = inputs.num_logits
        goes_on = inputs.kv_lens > lens
        num_places = self._slots.num_places
        is_direct = (lens == num_places) & goes_on
        # A chunk of a prompt can have ``num_places`` tokens, too, but not all of these tokens need
        # logits. All tokens of a request that verifies drafts need logits.
        if self._passed is not None:
            is_direct &= logits == num_places
        num_direct = int(np.logical_and.accumulate(is_direct).sum())
        rows, bases = inputs.rows[:num_direct], self._slots.bases(inputs.rows)
        arrays = [bases[:num_direct], rows]
        prompts, slots = lens[num_direct:], bases[num_direct:]
        if has_prompts := num_direct < len(lens):
            arrays += prompt_arrays(
                slots, slots, prompts, goes_on[num_direct:].astype(np.int32), self._width
            )
        sent_bases, sent_rows, *sent = upload_arrays(self._npu, arrays)
        ends: list[int] = np.cumsum(prompts).tolist()
        return StateMetadata(
            direct=self._direct(sent_bases, sent_rows) if num_direct else None,
            prompts=PromptStates.of_step(sent, ends) if has_prompts else None,
        )

    def begin(self, rows: Sequence[int], states: Sequence[Tensor]) -> None:
        """Prepare the states of rows in which new requests begin. Call this before ``restore``.

        Args:
            states: the tensors of all states, which are indexed by slot.
        """
        if not (self._poisons and rows):
            return
        bases = self._slots.bases(np.array(rows, np.int64))
        index = self._npu.upload(np.add.outer(bases, np.arange(self._slots.num_places)).ravel())
        for tensor in states:
            tensor.view(torch.int32).index_fill_(0, index, -1)  # NaN, as in new memory

    def restore(self, restored: bytes, states: Sequence[Tensor]) -> None:
        """Copy the states of checkpoints to the rows whose requests continue from these
        checkpoints.

        Args:
            restored: the field ``restored`` of ``RankBatch``.
            states: the tensors of all states, which are indexed by slot.
        """
        rows, checkpoints = unpack_ints(restored, 2).T
        self._copy(states, self._slots.checkpoints(checkpoints), self._slots.bases(rows))

    def keep(self, kept: bytes, states: Sequence[Tensor]) -> None:
        """Copy the states of rows to checkpoints. Call this after the decoder has run.

        Only steps with chunks of prompts write checkpoints. Those steps do not replay full graphs.

        Args:
            kept: the field ``kept`` of ``RankBatch``.
        """
        rows, checkpoints = unpack_ints(kept, 2).T
        self._copy(states, self._slots.bases(rows), self._slots.checkpoints(checkpoints))

    def _copy(self, states: Sequence[Tensor], sources: IntArray, targets: IntArray) -> None:
        index = self._npu.upload(np.stack([sources, targets]).astype(np.int64))
        for tensor in states:
            tensor.index_copy_(0, index[1], tensor.index_select(0, index[0]))

    def _direct(self, bases: Tensor, rows: Tensor | None) -> DirectStates:
        """Return the slots for requests that update their states token by token: the slots that
        contain their present states, and the slots for their new states.

        Args:
            bases: [n] int32, the first state slot of each request's row; 0 for padding.
            rows: [n] int32, the row of each request; not used if the deployment uses no drafts.
        """
        layout = self._layout(len(bases))
        if self._passed is None or rows is None:
            accepted = layout.ones
        else:
            accepted = self._passed.index_select(0, rows) + 1
        return DirectStates.of_windows(bases, accepted, layout)

    def _layout(self, num_reqs: int) -> DirectLayout:
        """Return the constant index arrays for ``num_reqs`` requests that update their states token
        by token.

        The arrays are made once and never freed, because graphs contain their addresses.
        """
        if num_reqs not in self._layouts:
            self._layouts[num_reqs] = DirectLayout.of_graph(
                num_reqs, self._slots.num_places, self._width, self._npu.device
            )
        return self._layouts[num_reqs]
