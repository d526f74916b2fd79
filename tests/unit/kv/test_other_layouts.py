"""A group reads a block from files of groups that divide the heads among a different number of
ranks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dist_aclgraph.kv.block_files import BlockFiles
from dist_aclgraph.kv.other_layouts import HeadPart, OtherLayouts

NAME, SLOTS, HEADS = bytes(16), 6, 12
HEAD_BYTES = (4, 2, 4)  # of each tensor
COUNTS = [1, 2, 3, 4, 6, 12]
# A block with all heads: one array for each tensor, [slots, heads, head_bytes].
WHOLE = [
    np.random.default_rng(0).integers(0, 256, (SLOTS, HEADS, size), np.uint8) for size in HEAD_BYTES
]


def blocks_of(count: int) -> list[bytes]:
    """Divide the heads of a block into ``count`` equal parts; return these parts of the block."""
    parts = [np.split(tensor, count, axis=1) for tensor in WHOLE]
    return [b"".join(part.tobytes() for part in each) for each in zip(*parts, strict=True)]


def files_of(root: Path, part: HeadPart) -> BlockFiles:
    return BlockFiles(root, root / f"{part.index}-of-{part.count}", 1 << 20)


def write(root: Path, count: int, *, skip: int | None = None) -> None:
    for index, block in enumerate(blocks_of(count)):
        if index != skip:
            files_of(root, HeadPart(index, count, HEADS)).write(NAME, [memoryview(block)])


def read(root: Path, index: int, count: int) -> bytes | None:
    """Return what rank ``index`` of ``count`` reads; None if it does not find the block."""
    other = OtherLayouts(HeadPart(index, count, HEADS), SLOTS, lambda part: files_of(root, part))
    sizes = [SLOTS * HEADS // count * head_bytes for head_bytes in HEAD_BYTES]
    buffers = [memoryview(bytearray(size)) for size in sizes]
    is_whole = other.read(NAME, buffers)
    assert is_whole == other.has(NAME)
    return b"".join(buffers) if is_whole else None


@pytest.mark.parametrize("source", COUNTS)
@pytest.mark.parametrize("target", COUNTS)
def test_heads_are_found_in_every_division(tmp_path: Path, source: int, target: int) -> None:
    write(tmp_path, source)
    for index, block in enumerate(blocks_of(target)):
        expected = None if source == target else block
        assert read(tmp_path, index, target) == expected


def test_a_missing_part_is_no_block(tmp_path: Path) -> None:
    write(tmp_path, 4, skip=2)
    assert read(tmp_path, 0, 2) == blocks_of(2)[0]
    assert read(tmp_path, 1, 2) is None
    write(tmp_path, 1)
    assert read(tmp_path, 1, 2) == blocks_of(2)[1]


def test_a_damaged_part_is_taken_from_another_division(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 4)
    path = files_of(tmp_path, HeadPart(0, 1, HEADS)).path_of(NAME)
    path.write_bytes(path.read_bytes()[:-1])
    assert read(tmp_path, 0, 2) == blocks_of(2)[0]


def test_divisions_agree_about_common_heads() -> None:
    for count in COUNTS:
        for index in range(count):
            part = HeadPart(index, count, HEADS)
            ours = set(range(part.first, part.first + part.size))
            for other in COUNTS:
                found = [set(range(o.first, o.first + o.size)) for o in part.overlaps(other)]
                assert ours <= set().union(*found)
                assert all(ours & each for each in found)
                assert sum(map(len, found)) == len(set().union(*found))
