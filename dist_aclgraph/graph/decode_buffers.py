"""The persistent inputs and outputs of decode graphs, allocated once at the largest size.

A step writes them from one pinned twin: one copy for tokens, positions and slots, one more for the
block table when it changed. Padding: token 0, position 0, slot -1 (written nowhere), KV length 1 in
block 0, the dummy block that no request owns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dist_aclgraph.device.npu import Npu, runtime

IntArray = npt.NDArray[np.int32]

PADDING_SLOT = -1
PADDING_KV_LEN = 1


class DecodeBuffers:
    """Inputs by address, for graphs; host twins, for the input batch.

    Attributes:
        token_ids, positions, slot_mapping: [max_tokens] int32 on the device.
        block_table: [max_reqs, max_blocks] int32 on the device.
        logits: [max_tokens, vocab]; sampled: [max_tokens] int32, the most probable token.
    """

    def __init__(
        self, npu: Npu, max_tokens: int, max_blocks: int, vocab_size: int, dtype: torch.dtype
    ) -> None:
        device = npu.device
        self._inputs = torch.zeros((3, max_tokens), dtype=torch.int32, device=device)
        self.token_ids, self.positions, self.slot_mapping = self._inputs.unbind(0)
        self.block_table = torch.zeros((max_tokens, max_blocks), dtype=torch.int32, device=device)
        self.logits = torch.zeros((max_tokens, vocab_size), dtype=dtype, device=device)
        self.sampled = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._inputs_cpu = npu.pinned((3, max_tokens), torch.int32)
        self._block_table_cpu = npu.pinned((max_tokens, max_blocks), torch.int32)
        self._inputs_np: IntArray = self._inputs_cpu.numpy()
        self._block_table_np: IntArray = self._block_table_cpu.numpy()
        self._written_rows = 0
        self._stream = runtime().current_stream()
        self._copied: Any = runtime().Event()
        self._is_read = True  # whether the device is known to be done with the pinned twins

    @property
    def addresses(self) -> tuple[int, ...]:
        """What a captured graph has baked in."""
        tensors = (self._inputs, self.block_table, self.logits, self.sampled)
        return tuple(t.data_ptr() for t in tensors)

    def write(
        self,
        num_padded: int,
        token_ids: IntArray,
        positions: IntArray,
        slots: IntArray,
        block_table: IntArray,
    ) -> None:
        """Send one decode step's inputs, padded to ``num_padded``, to the device.

        Args:
            token_ids, positions, slots: [num_reqs].
            block_table: [num_reqs, num_blocks] with num_blocks <= max_blocks.
        """
        if not self._is_read:
            self._copied.synchronize()
        n = len(token_ids)
        inputs = self._inputs_np
        inputs[0, :n], inputs[1, :n], inputs[2, :n] = token_ids, positions, slots
        inputs[:2, n:num_padded] = 0
        inputs[2, n:num_padded] = PADDING_SLOT
        self._inputs.copy_(self._inputs_cpu, non_blocking=True)
        if self._update_block_table(n, block_table):
            rows = max(n, self._written_rows)
            self.block_table[:rows].copy_(self._block_table_cpu[:rows], non_blocking=True)
            self._written_rows = n
        self._copied.record(self._stream)
        self._is_read = False

    def mark_read(self) -> None:
        """Note that the host has seen a later result of the stream: the twins may be written."""
        self._is_read = True

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

    def as_inputs(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tokens, positions, slots and block table of one bucket, as views."""
        return (
            self.token_ids[:num_tokens],
            self.positions[:num_tokens],
            self.slot_mapping[:num_tokens],
            self.block_table[:num_tokens],
        )
