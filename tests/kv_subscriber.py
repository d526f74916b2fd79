"""A subscriber of KV events. It decodes events with the types that vLLM publishes for subscribers.

Events that are encoded as arrays have the types of vLLM 0.15. Events that are encoded as maps have
the types of vLLM 0.26.
"""

from __future__ import annotations

from typing import Any

import msgspec

Hash = int | bytes


class ArrayEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(ArrayEvent):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(ArrayEvent):
    block_hashes: list[Hash]
    medium: str | None


class AllBlocksCleared(ArrayEvent):
    pass


class MapEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStoredMap(MapEvent, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemovedMap(MapEvent, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksClearedMap(MapEvent, tag="AllBlocksCleared"):
    pass


class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class MapBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStoredMap | BlockRemovedMap | AllBlocksClearedMap]
    data_parallel_rank: int | None = None


class Subscriber:
    """Stores which blocks one publisher has, by the blocks' names.

    Attributes:
        blocks: for each block, its parent and its tokens.
        seen: names of the applied events, in order.
    """

    def __init__(self, encoding: str = "array") -> None:
        self._decoder = msgspec.msgpack.Decoder(ArrayBatch if encoding == "array" else MapBatch)
        self.blocks: dict[Hash, tuple[Hash | None, tuple[int, ...]]] = {}
        self.seen: list[str] = []
        self.rank: int | None = None

    def apply(self, payload: bytes) -> None:
        batch = self._decoder.decode(payload)
        self.rank = batch.data_parallel_rank
        for event in batch.events:
            self.seen.append(type(event).__name__.removesuffix("Map"))
            if isinstance(event, BlockStored | BlockStoredMap):
                self._store(event)
            elif isinstance(event, BlockRemoved | BlockRemovedMap):
                assert event.medium == "GPU"
                for name in event.block_hashes:
                    del self.blocks[name]
            else:
                self.blocks.clear()

    def _store(self, event: BlockStored | BlockStoredMap) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert (event.medium, event.lora_id, event.lora_name) == ("GPU", None, None)
        assert len(event.token_ids) == size * len(event.block_hashes)
        for index, name in enumerate(event.block_hashes):
            assert isinstance(name, int) and 0 <= name < 1 << 64
            assert name not in self.blocks
            tokens = tuple(event.token_ids[index * size : (index + 1) * size])
            self.blocks[name] = (parent, tokens)
            parent = name

    def longest_prefix(self, tokens: list[int], size: int) -> int:
        """Return how many blocks at the beginning of ``tokens`` the publisher has. A router uses
        this number.
        """
        children = {block: name for name, block in self.blocks.items()}
        parent: Hash | None = None
        for count in range(len(tokens) // size):
            found = children.get((parent, tuple(tokens[count * size : (count + 1) * size])))
            if found is None:
                return count
            parent = found
        return len(tokens) // size
