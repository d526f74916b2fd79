"""Describes the changes of a prefix cache as events in vLLM's format, for external routers.

vLLM defines the events in ``vllm/distributed/kv_events.py``. The events here have the fields that
every version of vLLM from 0.9 on sends, in vLLM's order. Later versions of vLLM add optional
fields. The routers of llm-d and Dynamo accept events in two encodings: as arrays (vLLM up to 0.23)
and as maps (vLLM from 0.24).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from dist_aclgraph.kv.checkpoints import BlockHash

Encoding = Literal["array", "map"]
# the name of the device's memory in events; it is the only name that all routers understand
DEVICE = "GPU"
NAME_BYTES = 8  # in events, the name of a block is an unsigned integer of 64 bits


class _Stored(msgspec.Struct, gc=False):
    """Consecutive blocks of a prefix that were stored.

    Attributes:
        parent_block_hash: name of the block before the first stored block; None if the first stored
            block begins the prefix.
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
    """Blocks that were evicted."""

    block_hashes: list[int]
    medium: str = DEVICE


class _Cleared(msgspec.Struct, gc=False):
    """The cache is empty."""


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

    A router that applies the events in order knows all blocks that ``BlockPool.match`` can find.
    The exceptions are blocks that were never reported to ``stored``, such as blocks of requests
    with a salt.
    """

    def __init__(self, block_size: int, encoding: Encoding = "array") -> None:
        self._block_size = block_size
        self._make_stored, self._make_removed, self._make_cleared = _KINDS[encoding]
        # blocks that were reported as stored, and whose eviction was not reported yet
        self._known: set[BlockHash] = set()
        self._events: list[_Stored | _Removed | _Cleared] = []
        self._last_stored = b""  # hash of the last block of the latest ``_Stored`` event

    def stored(self, block_hash: BlockHash, parent: BlockHash, tokens: Sequence[int]) -> None:
        """Report that a block was stored. Consecutive blocks of a prefix are combined to one event.

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
        """Report that a block was evicted. Do nothing if ``stored`` has not reported this block."""
        if block_hash not in self._known:
            return
        self._known.remove(block_hash)
        last = self._events[-1] if self._events else None
        if isinstance(last, _Removed):
            last.block_hashes.append(block_name(block_hash))
        else:
            self._events.append(self._make_removed([block_name(block_hash)]))

    def cleared(self) -> None:
        """Report that the cache is empty. Earlier events that ``take`` has not returned are
        dropped, because the empty cache makes them irrelevant.
        """
        self._known.clear()
        self._events = [self._make_cleared()]

    def take(self, now_s: float, rank: int) -> bytes:
        """Return all events since the last call as one message; b"" if there are none.

        Args:
            now_s: the time of the message, in seconds since 1970.
            rank: value of the message's field for the data-parallel rank. The caller passes the
                index of the port that publishes the message.
        """
        if not self._events:
            return b""
        events, self._events = self._events, []
        return _encoder.encode((now_s, events, rank))
