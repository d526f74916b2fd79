"""Reads a rank's blocks from the files of other groups. The other groups divide the heads among
more or fewer ranks than this rank's group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from dist_aclgraph.kv.block_files import BlockFiles, Buffers
from dist_aclgraph.kv.checkpoints import BlockHash


@dataclass(frozen=True)
class HeadPart:
    """One of ``count`` equal parts of a model's ``total`` key-value heads."""

    index: int
    count: int
    total: int

    @property
    def size(self) -> int:
        return self.total // self.count

    @property
    def first(self) -> int:
        return self.index * self.size

    def overlaps(self, count: int) -> Iterator[HeadPart]:
        """Divide all heads into ``count`` equal parts; yield the parts that have heads in common
        with this part.
        """
        size = self.total // count
        for index in range(self.first // size, -(-(self.first + self.size) // size)):
            yield HeadPart(index, count, self.total)


class OtherLayouts:
    """The files of one tier that other groups have written. In these groups, each rank keeps more
    or fewer heads than this rank, which keeps ``part``.

    In a block, each tensor has the shape [token slots, heads of the part, bytes of a head].

    Args:
        num_slots: number of token slots of a block.
        files_of: returns the files of another part of the heads.
    """

    def __init__(
        self, part: HeadPart, num_slots: int, files_of: Callable[[HeadPart], BlockFiles]
    ) -> None:
        self._part = part
        self._num_slots = num_slots
        # Each item describes one division of the heads. The item lists the parts that have heads in
        # common with ``part``, and the files of these parts.
        self._divisions = [
            [(other, files_of(other)) for other in part.overlaps(count)]
            for count in range(1, part.total + 1)
            if part.total % count == 0 and count != part.count
        ]

    def has(self, block_hash: BlockHash) -> bool:
        return any(_have(division, block_hash) for division in self._divisions)

    def read(self, block_hash: BlockHash, buffers: Buffers, depth: int = 0) -> bool:
        """Read a block; return False if files of the block are missing in every division of the
        heads. See ``BlockFiles.read``.
        """
        for division in self._divisions:
            if _have(division, block_hash) and all(
                self._read_part(other, files, block_hash, buffers, depth)
                for other, files in division
            ):
                return True
        return False

    def touch(self, block_hash: BlockHash, depth: int) -> None:
        for division in self._divisions:
            for _, files in division:
                files.touch(block_hash, depth)

    def delete(self, block_hash: BlockHash) -> None:
        for division in self._divisions:
            for _, files in division:
                files.delete(block_hash)

    def _read_part(
        self,
        other: HeadPart,
        files: BlockFiles,
        block_hash: BlockHash,
        buffers: Buffers,
        depth: int,
    ) -> bool:
        """Read the heads that are both in the part ``other`` and in this rank's part. Return
        whether the file was read.
        """
        ours = self._part
        stored = [bytearray(len(buffer) // ours.size * other.size) for buffer in buffers]
        if not files.read(block_hash, [memoryview(each) for each in stored], depth):
            return False
        first = max(ours.first, other.first)
        end = min(ours.first + ours.size, other.first + other.size)
        for buffer, found in zip(buffers, stored, strict=True):
            target = np.frombuffer(buffer, np.uint8).reshape(self._num_slots, ours.size, -1)
            source = np.frombuffer(found, np.uint8).reshape(self._num_slots, other.size, -1)
            target[:, first - ours.first : end - ours.first] = source[
                :, first - other.first : end - other.first
            ]
        return True


def _have(division: list[tuple[HeadPart, BlockFiles]], block_hash: BlockHash) -> bool:
    return all(files.has(block_hash) for _, files in division)
