"""A block is read from files of groups that divide the heads among other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dist_aclgraph.context.shards import Shards
from dist_aclgraph.kv.block_files import BlockFiles
from dist_aclgraph.kv.other_layouts import HeadPart, OtherLayouts
from tests.kv_reshard import BlockLayout, BlockTensor
from tests.unit.kv.test_reshard import Blocks, logical_kv, scatter

NAME, SLOTS, HEADS = bytes(16), 6, 12
TENSORS = (BlockTensor(HEADS, 4), BlockTensor(HEADS, 2), BlockTensor(HEADS, 4))
COUNTS = [1, 2, 3, 4, 6, 12]


def blocks_of(count: int) -> Blocks:
    layout = BlockLayout(TENSORS, count, Shards(SLOTS))
    return scatter(layout, logical_kv(TENSORS, SLOTS), SLOTS)


def files_of(root: Path, part: HeadPart) -> BlockFiles:
    return BlockFiles(root, root / f"{part.index}-of-{part.count}", 1 << 20)


def write(root: Path, count: int, *, skip: int | None = None) -> None:
    for index, (block,) in enumerate(blocks_of(count)):
        if index != skip:
            files_of(root, HeadPart(index, count, HEADS)).write(NAME, [memoryview(block.tobytes())])


def read(root: Path, index: int, count: int) -> bytes | None:
    """Return what a rank reads; None if it finds nothing."""
    other = OtherLayouts(HeadPart(index, count, HEADS), SLOTS, lambda part: files_of(root, part))
    sizes = [SLOTS * HEADS // count * tensor.head_bytes for tensor in TENSORS]
    buffers = [memoryview(bytearray(size)) for size in sizes]
    is_whole = other.read(NAME, buffers)
    assert is_whole == other.has(NAME)
    return b"".join(buffers) if is_whole else None


@pytest.mark.parametrize("source", COUNTS)
@pytest.mark.parametrize("target", COUNTS)
def test_heads_are_found_in_every_division(tmp_path: Path, source: int, target: int) -> None:
    write(tmp_path, source)
    for index, (block,) in enumerate(blocks_of(target)):
        expected = None if source == target else block.tobytes()
        assert read(tmp_path, index, target) == expected


def test_a_missing_part_is_no_block(tmp_path: Path) -> None:
    write(tmp_path, 4, skip=2)
    assert read(tmp_path, 0, 2) == blocks_of(2)[0][0].tobytes()
    assert read(tmp_path, 1, 2) is None
    write(tmp_path, 1)
    assert read(tmp_path, 1, 2) == blocks_of(2)[1][0].tobytes()


def test_a_damaged_part_is_taken_from_another_division(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 4)
    path = files_of(tmp_path, HeadPart(0, 1, HEADS)).path_of(NAME)
    path.write_bytes(path.read_bytes()[:-1])
    assert read(tmp_path, 0, 2) == blocks_of(2)[0][0].tobytes()


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


def test_the_block_of_heads_has_the_order_of_the_cache() -> None:
    ((block,),) = blocks_of(1)
    first = np.frombuffer(block.tobytes(), np.uint8)[: SLOTS * HEADS * 4]
    kv = logical_kv(TENSORS, SLOTS)[0]
    assert (first.reshape(SLOTS, HEADS, 4) == kv).all()
