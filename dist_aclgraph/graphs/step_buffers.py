"""The inputs and outputs of graphs, at fixed addresses. The buffers are allocated once, for the
largest graph.

The integer inputs of a graph (tokens, positions, slots, and the indices of the tokens whose logits
are needed, called places) are at the front of one buffer, each array at an aligned address. So a
step sends all of these inputs in one copy. If the block table has changed, the step sends the table
in a second copy. If the pinned memory already contains an array, a step does not write the array
again. In a graph that verifies drafts, all tokens are places. Such a graph has inputs for drafts,
and no input ``places``. Padding has these values: token 0, position 0, slot -1 (its KV is not
written), place 0, the spare row, 0 as the maximum number of accepted drafts, and block 0 (the dummy
block, which no request owns).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.arrays.packing import pack_parts
from dist_aclgraph.context.shards import PADDING_SLOT
from dist_aclgraph.context.state_slots import StateSlots
from dist_aclgraph.device.npu import Npu, runtime
from dist_aclgraph.graphs.device_step import DeviceStep, DraftInputs
from dist_aclgraph.graphs.token_table import TokenTable
from dist_aclgraph.planning.buckets import BufferSizes
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.step_sizes import input_sizes
from dist_aclgraph.steps.draft_places import DraftPlaces
from dist_aclgraph.steps.host_step import NO_INTS, NO_STEP, HostStep
from dist_aclgraph.steps.padding import pad_mixed

PADDING = (0, 0, PADDING_SLOT, 0)  # padding values: token, position, slot and place
NOTHING_HELD = (None,) * (len(PADDING) + 1)


class StepBuffers:
    """Owns the inputs and outputs of graphs, and the pinned memory from which inputs are sent.

    Attributes:
        addresses: the addresses of the buffers, which captured graphs contain.
        logits: [max_samples, vocab], the logits from which tokens are sampled.
        tokens: the token table, whose attribute ``latest`` is the tensor ``sampled``. None if the
            deployment uses drafts.
        sampled: [max_samples] int32, the sampled tokens. A replay writes the most probable tokens;
            then the sampler overwrites the tokens that must be chosen in another way.
        best: [max_samples], for each sampled token, the greatest of its logits. It is NaN or
            infinite if the logits contain NaN or infinity.
        hidden: [max_tokens, hidden], hidden states of all tokens; empty if the deployment uses no
            drafts.
        accepted: [max_reqs] int32, number of accepted drafts of each request. A replay compares the
            drafts with the most probable tokens. If the sampler has overwritten tokens, the drafts
            are compared again with the sampled tokens.
        num_written: number of steps whose inputs have been written.
    """

    def __init__(
        self,
        npu: Npu,
        largest: BufferSizes,
        max_blocks: int,
        vocab_size: int,
        dtype: torch.dtype,
        *,
        num_drafts: int = 0,
        spare_row: int = 0,
        hidden_size: int = 0,
        steps_in_flight: int = 1,
        state_slots: StateSlots | None = None,
        reads_device_rows: bool = False,
    ) -> None:
        """Allocate the buffers of the largest graphs.

        Args:
            num_drafts: k, number of drafts of each request that decodes.
            spare_row: row of padding requests.
            steps_in_flight: maximum number of steps in flight; each step in flight has its own
                pinned memory.
            state_slots: slots of recurrent states; None if the model has no recurrent state.
            reads_device_rows: whether attention reads lengths on the device.
        """
        device = npu.device
        max_tokens, max_reqs, max_samples = largest
        self._max_reqs = max_reqs
        self._num_drafts, self._spare_row = num_drafts, spare_row
        self._state_slots = state_slots
        self._reads_device_rows = reads_device_rows
        sizes = input_sizes(
            max_tokens,
            max_reqs,
            num_drafts,
            has_state=state_slots is not None,
            has_lens=reads_device_rows,
        )
        _, size = pack_parts(sizes)
        self._inputs = torch.zeros(size, dtype=torch.int32, device=device)
        self._block_table = torch.zeros((max_reqs, max_blocks), dtype=torch.int32, device=device)
        self.logits = torch.zeros((max_samples, vocab_size), dtype=dtype, device=device)
        # Eager steps also write to this tensor, because the next step reads their tokens from this
        # tensor.
        num_sampled = max(max_samples, spare_row)
        self.tokens: TokenTable | None = None
        if num_drafts:
            self.sampled = torch.zeros(num_sampled, dtype=torch.int32, device=device)
        else:
            self.tokens = TokenTable(vocab_size, num_sampled, device)
            self.sampled = self.tokens.latest
        self.best = torch.zeros(max_samples, dtype=dtype, device=device)
        self.hidden = torch.zeros(
            (max_tokens if num_drafts else 0, hidden_size), dtype=dtype, device=device
        )
        self.accepted = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        self._every_token = torch.arange(max_tokens, dtype=torch.int32, device=device)
        tensors = (self._inputs, self._block_table, self.logits, self.sampled)
        self.addresses = tuple(tensor.data_ptr() for tensor in tensors)
        self._views: dict[BatchDescriptor, DeviceStep] = {}
        self._layouts: dict[BatchDescriptor, _Layout] = {}
        self._twins = [_Twins(npu, size, (max_reqs, max_blocks)) for _ in range(steps_in_flight)]
        self.num_written = 0
        # The host's copy of the block table that is on the device.
        self._table: IntArray = np.zeros((max_reqs, max_blocks), np.int32)
        # The block table of the last step; None before the first step and after ``forget``.
        self._latest_table: IntArray | None = None
        # Size of the last step's block table. All later columns of ``_table`` are zero.
        self._written_rows = 0
        self._written_width = 0
        self._is_forgotten = False  # whether the next step must send all rows of the block table
        self._stream = runtime().current_stream()

    def write(self, graph: BatchDescriptor, step: HostStep) -> None:
        """Send one step's inputs to the device, padded to the size of ``graph``.

        If the graph verifies drafts, all tokens are sampled, and ``step.places`` is not used.
        """
        assert len(step.token_ids) <= graph.num_tokens, "a step must fit into its graph"
        index = self.num_written % len(self._twins)
        twins = self._twins[index]
        twins.wait()
        self.num_written += 1
        twins.number = self.num_written
        if graph not in self._layouts:
            self._layouts[graph] = self._make_layout(graph)
        layout = self._layouts[graph]
        arrays = layout.arrays[index]
        held = twins.held if twins.graph == graph else NOTHING_HELD
        # In a piecewise step, ``step.places`` can have more elements than the graph's input
        # ``places``. The step does not use this input: ``upload_step`` sends ``step.places`` in
        # another tensor.
        values = step.token_ids, step.positions, step.slots, step.places, step.rows
        num_filled = 3 if self._verifies(graph) else 4
        for array, new, old, padding in zip(
            arrays, values[:num_filled], held, PADDING, strict=False
        ):
            if new is not old:
                _fill(array, new[: len(array)], padding)
        if self._verifies(graph):
            self._write_drafts(arrays[3:7], step.drafts)
        if self._has_lens(graph):
            arrays[4][:], arrays[5][:] = pad_mixed(graph, step.query_ends, step.kv_lens)
        if self._state_slots is not None and step.rows is not held[-1]:
            _fill(arrays[-1], self._state_slots.bases(step.rows), 0)
        twins.graph, twins.held = graph, values
        layout.inputs.copy_(layout.twins[index], non_blocking=True)
        rows = self._update_block_table(step.block_table)
        if rows is not None:
            twins.table[rows] = self._table[rows]
            self._block_table[rows].copy_(twins.block_table[rows], non_blocking=True)
        twins.copied.record(self._stream)
        twins.is_read = False

    def forget(self) -> None:
        """After an abort of the device, let the next step send all inputs again, because written
        values may not have reached the device.
        """
        self.mark_read(self.num_written)
        self._table[:] = 0
        self._latest_table = None
        self._written_rows = self._written_width = 0
        self._is_forgotten = True

    def write_padding(self, graph: BatchDescriptor) -> None:
        """Fill all inputs of a graph with padding."""
        self.write(graph, NO_STEP)

    def mark_read(self, num_written: int) -> None:
        """Record that the device has read the inputs of some steps, so that the pinned memory of
        these steps can be written again.

        Args:
            num_written: value of the attribute ``num_written`` after the last step whose inputs the
                device has read.
        """
        for twins in self._twins:
            twins.is_read |= twins.number <= num_written

    def inputs(self, graph: BatchDescriptor) -> DeviceStep:
        """Return a graph's inputs as views of the buffers. Each call for the same graph returns the
        same views.
        """
        if graph not in self._views:
            self._views[graph] = self._make_views(graph)
        return self._views[graph]

    def _make_layout(self, graph: BatchDescriptor) -> _Layout:
        parts, size = pack_parts(self._sizes(graph))
        twins = [twins.inputs[:size] for twins in self._twins]
        arrays = [[twin.numpy()[part] for part in parts] for twin in twins]
        return _Layout(self._inputs[:size], twins, arrays)

    def _make_views(self, graph: BatchDescriptor) -> DeviceStep:
        parts, _ = pack_parts(self._sizes(graph))
        token_ids, positions, slots, *rest = (self._inputs[part] for part in parts)
        block_table = self._block_table[: self._reqs_of(graph)]
        states = None if self._state_slots is None else rest.pop()
        if not self._verifies(graph):
            places, *lens = rest
            query_ends, kv_lens = lens or (None, None)
            return DeviceStep(
                token_ids,
                positions,
                slots,
                block_table,
                places,
                state_slots=states,
                query_ends=query_ends,
                kv_lens=kv_lens,
            )
        every, n = self._every_token[: graph.num_tokens], graph.num_reqs
        rows, most, behind, draft_slots = rest
        by_request = positions.view(n, graph.query_len)
        drafts = DraftInputs(rows, most, by_request, draft_slots.view(n, -1), every, behind)
        return DeviceStep(
            token_ids, positions, slots, block_table, every, drafts, state_slots=states
        )

    def _verifies(self, graph: BatchDescriptor) -> bool:
        return self._num_drafts > 0 and graph.query_len == self._num_drafts + 1

    def _has_lens(self, graph: BatchDescriptor) -> bool:
        """Whether the inputs of a graph include query ends and KV lengths. A graph for decode
        batches computes both from the positions.
        """
        return self._reads_device_rows and graph.mode == "FULL" and graph.query_len == 0

    def _write_drafts(self, parts: list[IntArray], drafts: DraftPlaces | None) -> None:
        """Fill the draft inputs ``rows``, ``most``, ``behind`` and ``slots``, with padding."""
        rows, most, behind, slots = parts
        _fill(rows, NO_INTS if drafts is None else drafts.rows, self._spare_row)
        _fill(most, NO_INTS if drafts is None else drafts.most, 0)
        _fill(behind, NO_INTS if drafts is None else drafts.behind, self._spare_row)
        behind[behind < 0] = self._spare_row
        _fill(slots, NO_INTS if drafts is None else drafts.slots.ravel(), PADDING_SLOT)

    def _reqs_of(self, graph: BatchDescriptor) -> int:
        # Piecewise graphs contain no attention, so they accept any number of requests.
        return graph.num_reqs or min(graph.num_tokens, self._max_reqs)

    def _sizes(self, graph: BatchDescriptor) -> list[int]:
        """Return the number of elements of each input array of a graph, in order."""
        num_drafts = self._num_drafts if self._verifies(graph) else 0
        return input_sizes(
            graph.num_tokens,
            self._reqs_of(graph),
            num_drafts,
            has_state=self._state_slots is not None,
            has_lens=self._has_lens(graph),
        )

    def _update_block_table(self, block_table: IntArray) -> slice | None:
        """Update the host's copy of the block table; return the range of rows to send, or None if
        no row needs to be sent.

        Each row has enough entries for the longest possible request. To save bytes, only the rows
        from the first to the last changed row are sent. Entries after a step's last column are set
        to the dummy block. In graphs whose lengths are never updated, attention reads the blocks of
        all entries. Blocks of earlier requests could contain NaN values, which a mask cannot hide.
        """
        if block_table is self._latest_table:
            return None
        self._latest_table = block_table
        n, width = block_table.shape
        live, later = self._table[:n, :width], self._table[:n, width : self._written_width]
        changed = np.flatnonzero((live != block_table).any(1) | later.any(1))
        live[changed] = block_table[changed]
        later[changed] = 0
        self._written_width = width
        first, end = (int(changed[0]), int(changed[-1]) + 1) if len(changed) else (n, 0)
        if self._written_rows > n:
            # Rows that belonged to live requests in the last step, and are padding now, must
            # contain the dummy block again.
            end = self._written_rows
            self._table[n:end] = 0
        self._written_rows = n
        if self._is_forgotten:
            first, end, self._is_forgotten = 0, len(self._table), False
        return slice(first, end) if first < end else None


class _Layout(NamedTuple):
    """Views of a graph's integer inputs in the buffers.

    Attributes:
        inputs: view of the device's buffer that contains all integer inputs of the graph.
        twins: one view of each pinned memory, with the size of ``inputs``. A step copies one of
            these views to ``inputs``.
        arrays: for each of the pinned memories, views of the input arrays in it.
    """

    inputs: Tensor
    twins: list[Tensor]
    arrays: list[list[IntArray]]


class _Twins:
    """Pinned memory from which one step's inputs are sent. This memory may be written again only
    after the device has read it.

    Attributes:
        table: the block table as an array.
        copied: event recorded after the copies.
        is_read: whether the host already knows that the copies are complete.
        number: value of ``StepBuffers.num_written`` after the step whose inputs are in this memory.
        graph: the graph for which these inputs are padded.
        held: the step's arrays whose values this memory contains.
    """

    def __init__(self, npu: Npu, size: int, table_shape: tuple[int, int]) -> None:
        self.inputs = npu.pinned((size,), torch.int32)
        self.block_table = npu.pinned(table_shape, torch.int32)
        self.table: IntArray = self.block_table.numpy()
        self._npu = npu
        self.copied: Any = runtime().Event()
        self.is_read = True
        self.number = 0
        self.graph: BatchDescriptor | None = None
        self.held: tuple[IntArray | None, ...] = NOTHING_HELD

    def wait(self) -> None:
        if not self.is_read:
            with self._npu.waiting():
                self.copied.synchronize()


def _fill(array: IntArray, values: IntArray, padding: int) -> None:
    array[: len(values)] = values
    array[len(values) :] = padding
