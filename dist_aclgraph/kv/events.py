"""Describes the changes of a prefix cache as events in vLLM's format, for routers outside.

vLLM defines the events in ``vllm/distributed/kv_events.py``. The fields and their order are those
that every version from 0.9 on sends; later versions add optional fields. Routers of llm-d and
Dynamo read the events both as arrays (vLLM up to 0.23) and as maps (from 0.24).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from dist_aclgraph.kv.checkpoints import BlockHash

Encoding = Literal["array", "map"]
# Name of the memory of the device, and its only name that all routers know.
DEVICE = "GPU"
NAME_BYTES = 8  # routers name a block by an unsigned integer of 64 bits


class _Stored(msgspec.Struct, gc=False):
    """Blocks that follow each other and can be found now.

    Attributes:
        parent_block_hash: name of the block before the first of these blocks; None if there is no
            such block.
        token_ids: the tokens of all these blocks.
        block_size: number of tokens of each block.
        lora_id, lora_name: always None.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: str = DEVICE
    lora_name: None = None


class _Removed(msgspec.Struct, gc=False):
    """Blocks that cannot be found any more."""

    block_hashes: list[int]
    medium: str = DEVICE


class _Cleared(msgspec.Struct, gc=False):
    """No block can be found."""


class _StoredArray(_Stored, array_like=True, tag="BlockStored", gc=False):
    pass


class _RemovedArray(_Removed, array_like=True, tag="BlockRemoved", gc=False):
    pass


class _ClearedArray(_Cleared, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


class _StoredMap(_Stored, tag="BlockStored", gc=False):
    pass


class _RemovedMap(_Removed, tag="BlockRemoved", gc=False):
    pass


class _ClearedMap(_Cleared, tag="AllBlocksCleared", gc=False):
    pass


_KINDS = {
    "array": (_StoredArray, _RemovedArray, _ClearedArray),
    "map": (_StoredMap, _RemovedMap, _ClearedMap),
}
_encoder = msgspec.msgpack.Encoder()


def block_name(block_hash: BlockHash) -> int:
    """Return a block's name in events: the last 64 bits of its hash."""
    return int.from_bytes(block_hash[-NAME_BYTES:], "big")


class CacheEvents:
    """Collects the changes of one rank's prefix cache until ``take`` returns them as a message.

    Applied in order, the events give the blocks that ``BlockPool.match`` can find, except blocks
    that were never reported by ``stored``, such as those of requests with a salt.
    """

    def __init__(self, block_size: int, encoding: Encoding = "array") -> None:
        self._block_size = block_size
        self._make_stored, self._make_removed, self._make_cleared = _KINDS[encoding]
        self._known: set[BlockHash] = set()  # blocks that subscribers know
        self._events: list[_Stored | _Removed | _Cleared] = []
        self._last_stored = b""  # hash of the last block, if the last event is a _Stored

    def stored(self, block_hash: BlockHash, parent: BlockHash, tokens: Sequence[int]) -> None:
        """Add a block. Neighbouring blocks of one prefix share an event.

        Args:
            parent: hash of the previous block; b"" for the first block of a prefix.
        """
        self._known.add(block_hash)
        last = self._events[-1] if self._events else None
        if isinstance(last, _Stored) and parent == self._last_stored:
            last.block_hashes.append(block_name(block_hash))
            last.token_ids += tokens
        else:
            before = block_name(parent) if parent else None
            self._events.append(
                self._make_stored([block_name(block_hash)], before, list(tokens), self._block_size)
            )
        self._last_stored = block_hash

    def removed(self, block_hash: BlockHash) -> None:
        """Remove a block, unless subscribers do not know it."""
        if block_hash not in self._known:
            return
        self._known.remove(block_hash)
        last = self._events[-1] if self._events else None
        if isinstance(last, _Removed):
            last.block_hashes.append(block_name(block_hash))
        else:
            self._events.append(self._make_removed([block_name(block_hash)]))

    def cleared(self) -> None:
        """Remove all blocks. Events that were not taken are dropped, because they have no effect
        now.
        """
        self._known.clear()
        self._events = [self._make_cleared()]

    def take(self, now_s: float, rank: int) -> bytes:
        """Return all events since the last call as one message; b"" if there are none.

        Args:
            now_s: the time of the message, in seconds since 1970.
            rank: the publisher's number, in vLLM the data-parallel rank.
        """
        if not self._events:
            return b""
        events, self._events = self._events, []
        return _encoder.encode((now_s, events, rank))
