"""The KV cache and the recurrent states of one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.device.npu import Npu, translated
from dist_aclgraph.engine.drafts.draft_steps import DraftSteps
from dist_aclgraph.models.attention_kind import Cache, CacheRoom
from dist_aclgraph.models.decoder import Decoder


@dataclass(eq=False)
class RankCaches:
    """Owns the caches of the decoder's layers, in ``decoder``. ``DraftSteps`` owns the cache of the
    next-token module, but methods of this class also create that cache and set it to zero.

    Attributes:
        drafts: the object that owns the next-token module's cache; None if the deployment uses no
            drafts.
        num_slots: number of slots of recurrent states; 0 if the model has no such state.
        int8_latents: whether latents are stored in int8.
    """

    npu: Npu
    model: Decoder
    drafts: DraftSteps | None
    block_size: int
    dtype: torch.dtype
    num_slots: int
    int8_latents: bool = False
    decoder: list[Cache] = field(default_factory=list)

    def make(self, num_blocks: int) -> None:
        """Replace all caches by empty caches."""
        # The old caches are freed first, because the memory might be too small for old and new
        # caches.
        self.free()
        self.npu.give_back()
        room = CacheRoom(num_blocks, self.block_size, self.dtype, self.num_slots, self.int8_latents)
        self.decoder += self.model.make_caches(room)
        if self.drafts is not None:
            self.drafts.make_cache(room)

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state_tensors())

    def tensors(self) -> list[Tensor]:
        """Return the tensors of all caches, including the next-token module's cache."""
        return [*self.block_tensors(), *self.state_tensors()]

    def block_tensors(self) -> list[Tensor]:
        """Return the tensors whose first dimension is the block id."""
        caches = [*self.decoder, *([] if self.drafts is None else [self.drafts.cache])]
        return [tensor for cache in caches for tensor in cache.tensors]

    def state_tensors(self) -> list[Tensor]:
        """Return the tensors whose first dimension is the slot of a recurrent state."""
        return [tensor for cache in self.decoder for tensor in cache.states]

    def free(self) -> None:
        """Free the decoder's caches."""
        self.decoder.clear()

    def zero(self) -> None:
        """Set all tensors to zero. Otherwise the tensors could contain NaN values, which would
        spread to results.

        Raises:
            DeviceError: the device failed.
        """
        with translated("clearing the KV cache"):
            for tensor in self.tensors():
                tensor.zero_()
        self.npu.synchronize()

    def clean(self, block_ids: IntArray) -> None:
        """Queue work that sets the blocks ``block_ids`` to zero. No step in flight may use these
        blocks.
        """
        index = self.npu.upload(block_ids.astype(np.int64))
        for tensor in self.block_tensors():
            # ``index_fill_`` does not accept int8 on an NPU. The number of bytes of each row is a
            # multiple of four, so the rows can be read as int32.
            words = tensor.view(torch.int32) if tensor.dtype == torch.int8 else tensor
            words.index_fill_(0, index, 0)
