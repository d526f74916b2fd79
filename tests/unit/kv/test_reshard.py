"""Blocks that are copied from one layout to another are the blocks that the other one makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.context.shards import Shards
from dist_aclgraph.errors import KVCacheError
from tests.kv_reshard import (
    LENGTH,
    SOURCE,
    TARGET,
    TARGET_BLOCK,
    TARGET_BYTE,
    BlockLayout,
    BlockTensor,
    Int64Array,
    plan_copies,
)

Bytes = npt.NDArray[np.uint8]
Blocks = list[list[Bytes]]  # for each place, its blocks

KEYS_AND_VALUES = (BlockTensor(4, 2), BlockTensor(4, 2)) * 2
LATENTS = (BlockTensor(1, 4), BlockTensor(1, 2), BlockTensor(1, 3, is_whole=True)) * 2

shards = st.builds(
    lambda interleave, turns, count: Shards(interleave * turns, count, interleave),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3, 4]),
)


def layouts(tensors: tuple[BlockTensor, ...]) -> st.SearchStrategy[BlockLayout]:
    parts = [1, 2, 4] if tensors == KEYS_AND_VALUES else [1]
    return st.builds(BlockLayout, st.just(tensors), st.sampled_from(parts), shards)


pairs = st.sampled_from([KEYS_AND_VALUES, LATENTS]).flatmap(
    lambda tensors: st.tuples(layouts(tensors), layouts(tensors))
)


def logical_kv(tensors: Sequence[BlockTensor], num_tokens: int) -> list[Bytes]:
    """Return random bytes of each tensor, [num_tokens, num_heads, head_bytes]."""
    random = np.random.default_rng(0)
    shape = [(num_tokens, each.num_heads, each.head_bytes) for each in tensors]
    return [random.integers(0, 256, size, np.uint8) for size in shape]


def scatter(layout: BlockLayout, kv: Sequence[Bytes], num_tokens: int) -> Blocks:
    """Return the blocks of each place, token by token."""
    count, size = layout.shards.count, layout.shards.tokens_per_block
    num_blocks = num_tokens // size
    blocks: Blocks = []
    for place in range(layout.num_places):
        part, shard = divmod(place, count)
        blocks.append([])
        for block in range(num_blocks):
            pieces = []
            for tensor, values in zip(layout.tensors, kv, strict=True):
                heads = tensor.num_heads // layout.num_parts
                first = part * heads
                whole = np.arange(block * size, (block + 1) * size)
                if tensor.is_whole:
                    pieces.append(values[whole])
                else:
                    turn = (whole // layout.shards.interleave) % count
                    pieces.append(values[whole[turn == shard]][:, first : first + heads])
            blocks[-1].append(np.concatenate([piece.ravel() for piece in pieces]))
    return blocks


def zeros(layout: BlockLayout, num_tokens: int) -> Blocks:
    count = num_tokens // layout.shards.tokens_per_block
    size = layout.block_bytes
    return [[np.zeros(size, np.uint8) for _ in range(count)] for _ in range(layout.num_places)]


def apply_copies(spans: Int64Array, sources: Blocks, targets: Blocks) -> None:
    for source, block, first, target, to_block, to, count in spans.tolist():
        targets[target][to_block][to : to + count] = sources[source][block][first : first + count]


def equal(first: Blocks, second: Blocks) -> bool:
    return np.array_equal(np.array(first), np.array(second))


@given(pairs)
def test_copied_blocks_are_the_blocks_that_the_target_makes(
    pair: tuple[BlockLayout, BlockLayout],
) -> None:
    source, target = pair
    num_tokens, spans = plan_copies(source, target)
    kv = logical_kv(source.tensors, num_tokens)
    copied = zeros(target, num_tokens)

    apply_copies(spans, scatter(source, kv, num_tokens), copied)

    assert equal(copied, scatter(target, kv, num_tokens))


@given(pairs)
def test_each_byte_is_copied_once(pair: tuple[BlockLayout, BlockLayout]) -> None:
    source, target = pair
    num_tokens, spans = plan_copies(source, target)

    counts = zeros(target, num_tokens)
    for _, _, _, place, block, first, length in spans.tolist():
        counts[place][block][first : first + length] += 1

    assert (np.array(counts) == 1).all()
    wanted = target.num_places * target.block_bytes
    assert spans[:, LENGTH].sum() == wanted * (num_tokens // target.shards.tokens_per_block)
    order = spans[:, [TARGET, TARGET_BLOCK, TARGET_BYTE]].tolist()
    assert order == sorted(order)


@given(pairs)
def test_the_way_back_gives_the_same_blocks(pair: tuple[BlockLayout, BlockLayout]) -> None:
    source, target = pair
    num_tokens, there = plan_copies(source, target)
    _, back = plan_copies(target, source)
    blocks = scatter(source, logical_kv(source.tensors, num_tokens), num_tokens)
    between, again = zeros(target, num_tokens), zeros(source, num_tokens)

    apply_copies(there, blocks, between)
    apply_copies(back, between, again)

    assert equal(again, blocks)


@given(layouts(KEYS_AND_VALUES) | layouts(LATENTS))
def test_equal_layouts_copy_whole_blocks(layout: BlockLayout) -> None:
    num_tokens, spans = plan_copies(layout, layout)

    assert num_tokens == layout.shards.tokens_per_block
    assert spans.tolist() == [
        [place, 0, 0, place, 0, 0, layout.block_bytes] for place in range(layout.num_places)
    ]


@pytest.mark.parametrize(
    ("source", "target", "num_spans", "length"),
    [
        # Other parts of the heads: one span for each token of each tensor.
        (BlockLayout(KEYS_AND_VALUES, 2, Shards(16)), BlockLayout(KEYS_AND_VALUES, 1, Shards(16)),
         4 * 16 * 2, 4),
        # Other block sizes: one span for each tensor and each block of the source.
        (BlockLayout(KEYS_AND_VALUES, 1, Shards(16)), BlockLayout(KEYS_AND_VALUES, 1, Shards(32)),
         4 * 2, 16 * 8),
        # Other shards: one span for each turn of ``interleave`` tokens.
        (BlockLayout(KEYS_AND_VALUES, 1, Shards(16, 2, 4)),
         BlockLayout(KEYS_AND_VALUES, 1, Shards(16)), 4 * 8, 4 * 8),
    ],
)  # fmt: skip
def test_the_length_of_spans(
    source: BlockLayout, target: BlockLayout, num_spans: int, length: int
) -> None:
    _, spans = plan_copies(source, target)

    assert Counter(spans[:, LENGTH].tolist()) == {length: num_spans}


def test_whole_tensors_are_read_from_all_places() -> None:
    tensors = (BlockTensor(1, 3, is_whole=True),)
    shards = Shards(16, 4)

    _, spans = plan_copies(BlockLayout(tensors, 1, shards), BlockLayout(tensors, 1, shards))

    assert spans[:, SOURCE].tolist() == [0, 1, 2, 3]


def test_heads_that_cannot_be_divided_and_other_models_are_refused() -> None:
    with pytest.raises(KVCacheError, match="4 heads cannot be divided into 3"):
        BlockLayout(KEYS_AND_VALUES, 3, Shards(16))
    with pytest.raises(KVCacheError, match="tensors of the two layouts differ"):
        plan_copies(*(BlockLayout(each, 1, Shards(16)) for each in (KEYS_AND_VALUES, LATENTS)))
