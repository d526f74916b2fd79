"""The persistent inputs and outputs of graphs, allocated once at the largest size.

A graph's integers lie at the front of one buffer, each array on an aligned place: tokens,
positions, slots, last tokens. So a step sends them in one copy, and the block table in one more
when it changed. Where all tokens are sampled, rows and slots of drafts lie in place of the
last tokens. Padding: token 0, position 0, slot -1 (written nowhere), last token 0, the spare row,
no draft accepted, and block 0, the dummy block that no request owns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.context.shards import PADDING_SLOT
from dist_aclgraph.device.npu import Npu, runtime
from dist_aclgraph.graphs.device_step import DeviceStep, DraftInputs
from dist_aclgraph.graphs.token_table import TokenTable
from dist_aclgraph.ints import IntArray
from dist_aclgraph.packing import pack_parts
from dist_aclgraph.planning.buckets import BufferSizes
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.draft_places import DraftPlaces
from dist_aclgraph.steps.host_step import NO_INTS, NO_STEP, HostStep


class StepBuffers:
    """Inputs by address, for graphs; host twins, for the input batch.

    Attributes:
        addresses: what a captured graph has baked in.
        logits: [max_samples, vocab].
        tokens: whose latest ones are ``sampled``; None with drafts.
        sampled: [max_samples] int32, what was sampled; behind a replay, the most probable token.
        hidden: [max_samples, hidden], of the verified tokens; None without drafts.
        accepted: [max_reqs] int32, how many drafts passed; behind a replay, by the most probable
            tokens.
        num_written: how many steps were written.
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
    ) -> None:
        """Allocate for the largest graphs.

        Args:
            num_drafts: k, of every request of a decode batch.
            spare_row: row of padding requests.
            steps_in_flight: steps that may be written while an earlier one still runs, and itself.
        """
        device = npu.device
        max_tokens, max_reqs, max_samples = largest
        self._max_reqs = max_reqs
        self._num_drafts, self._spare_row = num_drafts, spare_row
        drafts = [max_reqs] * 3 + [max_reqs * 3 * num_drafts] if num_drafts else [max_reqs]
        _, size = pack_parts([max_tokens] * 3 + drafts)
        self._inputs = torch.zeros(size, dtype=torch.int32, device=device)
        self._block_table = torch.zeros((max_reqs, max_blocks), dtype=torch.int32, device=device)
        self.logits = torch.zeros((max_samples, vocab_size), dtype=dtype, device=device)
        # Outside graphs, too: the next step has its tokens from here.
        num_sampled = max(max_samples, spare_row)
        self.tokens: TokenTable | None = None
        if num_drafts:
            self.sampled = torch.zeros(num_sampled, dtype=torch.int32, device=device)
        else:
            self.tokens = TokenTable(vocab_size, num_sampled, device)
            self.sampled = self.tokens.latest
        self.hidden = torch.zeros(
            (max_samples if num_drafts else 0, hidden_size), dtype=dtype, device=device
        )
        self.accepted = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        self._every_token = torch.arange(max_tokens, dtype=torch.int32, device=device)
        tensors = (self._inputs, self._block_table, self.logits, self.sampled)
        self.addresses = tuple(tensor.data_ptr() for tensor in tensors)
        self._views: dict[BatchDescriptor, DeviceStep] = {}
        self._ways: dict[BatchDescriptor, _Way] = {}
        self._twins = [_Twins(npu, size, (max_reqs, max_blocks)) for _ in range(steps_in_flight)]
        self.num_written = 0
        self._table: IntArray = np.zeros((max_reqs, max_blocks), np.int32)  # as the device has it
        self._written_rows = 0
        self._stream = runtime().current_stream()

    def write(self, graph: BatchDescriptor, step: HostStep) -> None:
        """Send one step's inputs, padded to ``graph``, to the device.

        Its places are of no use where all tokens are sampled.
        """
        index = self.num_written % len(self._twins)
        twins = self._twins[index]
        twins.wait()
        self.num_written += 1
        twins.number = self.num_written
        if graph not in self._ways:
            self._ways[graph] = self._make_way(graph)
        way = self._ways[graph]
        token_ids, positions, slots, *rest = way.arrays[index]
        _fill(token_ids, step.token_ids, 0)
        _fill(positions, step.positions, 0)
        _fill(slots, step.slots, PADDING_SLOT)
        if self._verifies(graph):
            self._write_drafts(rest, step.drafts)
        else:
            # With drafts there may be more, behind pieces: those places come with the eager rest.
            _fill(rest[0], step.places[: len(rest[0])], 0)
        way.inputs.copy_(way.twins[index], non_blocking=True)
        num_rows = len(step.block_table)
        if self._update_block_table(num_rows, step.block_table):
            rows = max(num_rows, self._written_rows)
            twins.table[:rows] = self._table[:rows]
            self._block_table[:rows].copy_(twins.block_table[:rows], non_blocking=True)
            self._written_rows = num_rows
        twins.copied.record(self._stream)
        twins.is_read = False

    def forget(self) -> None:
        """The device's work was aborted: what was written may not be there."""
        self.mark_read(self.num_written)
        self._table[:] = 0
        self._written_rows = len(self._table)  # so that the next step writes all rows

    def write_padding(self, graph: BatchDescriptor) -> None:
        """Fill all of a graph's inputs with padding."""
        self.write(graph, NO_STEP)

    def mark_read(self, num_written: int) -> None:
        """Note that the device has read what was written: its twins may be written again.

        Args:
            num_written: when that was.
        """
        for twins in self._twins:
            twins.is_read |= twins.number <= num_written

    def inputs(self, graph: BatchDescriptor) -> DeviceStep:
        """Return a graph's inputs as views, the same ones each time."""
        if graph not in self._views:
            self._views[graph] = self._make_views(graph)
        return self._views[graph]

    def _make_way(self, graph: BatchDescriptor) -> _Way:
        parts, size = pack_parts(self._sizes(graph))
        twins = [twins.inputs[:size] for twins in self._twins]
        arrays = [[twin.numpy()[part] for part in parts] for twin in twins]
        return _Way(self._inputs[:size], twins, arrays)

    def _make_views(self, graph: BatchDescriptor) -> DeviceStep:
        parts, _ = pack_parts(self._sizes(graph))
        token_ids, positions, slots, *rest = (self._inputs[part] for part in parts)
        block_table = self._block_table[: self._reqs_of(graph)]
        if not self._verifies(graph):
            return DeviceStep(token_ids, positions, slots, block_table, rest[0])
        every, n = self._every_token[: graph.num_tokens], graph.num_reqs
        rows, most, behind, draft_slots = rest
        by_request = positions.view(n, graph.query_len)
        drafts = DraftInputs(rows, most, by_request, draft_slots.view(n, -1), every, behind)
        return DeviceStep(token_ids, positions, slots, block_table, every, drafts)

    def _verifies(self, graph: BatchDescriptor) -> bool:
        return self._num_drafts > 0 and graph.query_len == self._num_drafts + 1

    def _write_drafts(self, parts: list[IntArray], drafts: DraftPlaces | None) -> None:
        """Fill rows, most, behind and slots, each padded to the requests of a graph."""
        rows, most, behind, slots = parts
        _fill(rows, NO_INTS if drafts is None else drafts.rows, self._spare_row)
        _fill(most, NO_INTS if drafts is None else drafts.most, 0)
        _fill(behind, NO_INTS if drafts is None else drafts.behind, self._spare_row)
        behind[behind < 0] = self._spare_row
        _fill(slots, NO_INTS if drafts is None else drafts.slots.ravel(), PADDING_SLOT)

    def _reqs_of(self, graph: BatchDescriptor) -> int:
        # Pieces hold no attention: any number of requests goes with them.
        return graph.num_reqs or min(graph.num_tokens, self._max_reqs)

    def _sizes(self, graph: BatchDescriptor) -> list[int]:
        """Return the sizes of a graph's arrays, in their order."""
        n = self._reqs_of(graph)
        rest = [n, n, n, n * 3 * self._num_drafts] if self._verifies(graph) else [n]
        return [graph.num_tokens] * 3 + rest

    def _update_block_table(self, n: int, block_table: IntArray) -> bool:
        """Bring the host's copy up to date; say whether anything changed."""
        width = block_table.shape[1]
        live = self._table[:n, :width]
        stale = self._written_rows > n
        if not stale and np.array_equal(live, block_table):
            return False
        live[:] = block_table
        # Rows that were live before and are padding now must name the dummy block again.
        self._table[n : self._written_rows] = 0
        return True


class _Way(NamedTuple):
    """How the integers of a graph come to the device.

    Attributes:
        inputs: on the device; twins: of each of the pinned memories.
        arrays: of each twin, the arrays in it.
    """

    inputs: Tensor
    twins: list[Tensor]
    arrays: list[list[IntArray]]


class _Twins:
    """Pinned memory that inputs are sent from. It is written when the device has read it.

    Attributes:
        table: the block table as an array.
        copied: recorded behind the copies.
        is_read: whether they are known to be done.
        number: of the step that is in it.
    """

    def __init__(self, npu: Npu, size: int, table_shape: tuple[int, int]) -> None:
        self.inputs = npu.pinned((size,), torch.int32)
        self.block_table = npu.pinned(table_shape, torch.int32)
        self.table: IntArray = self.block_table.numpy()
        self._npu = npu
        self.copied: Any = runtime().Event()
        self.is_read = True
        self.number = 0

    def wait(self) -> None:
        if not self.is_read:
            with self._npu.waiting():
                self.copied.synchronize()


def _fill(array: IntArray, values: IntArray, padding: int) -> None:
    array[: len(values)] = values
    array[len(values) :] = padding
