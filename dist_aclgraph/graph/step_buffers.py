"""The persistent inputs and outputs of graphs, allocated once at the largest size.

A graph's integers lie packed at the front of one buffer (tokens, positions, slots, last tokens), so
that a step sends exactly the live part and what padding demands, in one copy, and one more for the
block table when it changed. Padding: token 0, position 0, slot -1 (written nowhere), last token 0,
and block 0, the dummy block that no request owns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dist_aclgraph.device.npu import Npu, runtime
from dist_aclgraph.graph.descriptor import BatchDescriptor

IntArray = npt.NDArray[np.int32]

PADDING_SLOT = -1


class GraphInputs(NamedTuple):
    """Views of one graph's inputs on the device.

    Attributes:
        token_ids, positions, slot_mapping: [num_tokens] int32.
        last_tokens: [num_reqs] int32, which tokens' logits are wanted.
        block_table: [num_reqs, max_blocks] int32.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    last_tokens: Tensor
    block_table: Tensor


class StepBuffers:
    """Inputs by address, for graphs; host twins, for the input batch.

    Attributes:
        addresses: what a captured graph has baked in.
        logits: [max_reqs, vocab]; sampled: [max_reqs] int32, the most probable token.
    """

    def __init__(
        self,
        npu: Npu,
        max_tokens: int,
        max_reqs: int,
        max_blocks: int,
        vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        device = npu.device
        self._max_reqs = max_reqs
        size = 3 * max_tokens + max_reqs
        self._inputs = torch.zeros(size, dtype=torch.int32, device=device)
        self._block_table = torch.zeros((max_reqs, max_blocks), dtype=torch.int32, device=device)
        self.logits = torch.zeros((max_reqs, vocab_size), dtype=dtype, device=device)
        self.sampled = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        tensors = (self._inputs, self._block_table, self.logits, self.sampled)
        self.addresses = tuple(tensor.data_ptr() for tensor in tensors)
        self._views: dict[BatchDescriptor, GraphInputs] = {}
        self._inputs_cpu = npu.pinned((size,), torch.int32)
        self._block_table_cpu = npu.pinned((max_reqs, max_blocks), torch.int32)
        self._inputs_np: IntArray = self._inputs_cpu.numpy()
        self._block_table_np: IntArray = self._block_table_cpu.numpy()
        self._written_rows = 0
        self._stream = runtime().current_stream()
        self._copied: Any = runtime().Event()
        self._is_read = True  # whether the device is known to be done with the pinned twins

    def write(
        self,
        graph: BatchDescriptor,
        token_ids: IntArray,
        positions: IntArray,
        slots: IntArray,
        last_tokens: IntArray,
        block_table: IntArray,
    ) -> None:
        """Send one step's inputs, padded to ``graph``, to the device.

        Args:
            token_ids, positions, slots: [num_tokens], as many as are live.
            last_tokens: [num_sampled], indices into the tokens.
            block_table: [num_reqs, num_blocks] with num_blocks <= max_blocks.
        """
        if not self._is_read:
            self._copied.synchronize()
        n, bucket, size = len(token_ids), graph.num_tokens, self._size(graph)
        inputs = self._inputs_np
        for start, values, padding in (
            (0, token_ids, 0),
            (bucket, positions, 0),
            (2 * bucket, slots, PADDING_SLOT),
        ):
            inputs[start : start + n] = values
            inputs[start + n : start + bucket] = padding
        end = 3 * bucket + len(last_tokens)
        inputs[3 * bucket : end] = last_tokens
        inputs[end:size] = 0
        self._inputs[:size].copy_(self._inputs_cpu[:size], non_blocking=True)
        num_rows = len(block_table)
        if self._update_block_table(num_rows, block_table):
            rows = max(num_rows, self._written_rows)
            self._block_table[:rows].copy_(self._block_table_cpu[:rows], non_blocking=True)
            self._written_rows = num_rows
        self._copied.record(self._stream)
        self._is_read = False

    def write_padding(self, graph: BatchDescriptor) -> None:
        """Fill all of a graph's inputs with padding."""
        none = np.empty(0, np.int32)
        self.write(graph, none, none, none, none, np.empty((0, 1), np.int32))

    def mark_read(self) -> None:
        """Note that the host has seen a later result of the stream: the twins may be written."""
        self._is_read = True

    def inputs(self, graph: BatchDescriptor) -> GraphInputs:
        """Return a graph's inputs as views, the same ones each time."""
        if graph not in self._views:
            self._views[graph] = self._make_views(graph)
        return self._views[graph]

    def _make_views(self, graph: BatchDescriptor) -> GraphInputs:
        bucket, packed = graph.num_tokens, self._inputs
        return GraphInputs(
            packed[:bucket],
            packed[bucket : 2 * bucket],
            packed[2 * bucket : 3 * bucket],
            packed[3 * bucket : self._size(graph)],
            self._block_table[: self._reqs_of(graph)],
        )

    def _reqs_of(self, graph: BatchDescriptor) -> int:
        # Pieces hold no attention: any number of requests goes with them.
        return graph.num_reqs or min(graph.num_tokens, self._max_reqs)

    def _size(self, graph: BatchDescriptor) -> int:
        return 3 * graph.num_tokens + self._reqs_of(graph)

    def _update_block_table(self, n: int, block_table: IntArray) -> bool:
        """Bring the pinned twin up to date; say whether anything changed."""
        width = block_table.shape[1]
        live = self._block_table_np[:n, :width]
        stale = self._written_rows > n
        if not stale and np.array_equal(live, block_table):
            return False
        live[:] = block_table
        # Rows that were live before and are padding now must name the dummy block again.
        self._block_table_np[n : self._written_rows] = 0
        return True
