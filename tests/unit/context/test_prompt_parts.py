"""Law of attention in chunks: each query sees each key up to its own position exactly once."""

from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.context.prompt_parts import Part, find_keys, plan_parts
from dist_aclgraph.context.prompt_split import PromptSplit
from dist_aclgraph.context.shards import Shards

STEPS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=5)


def seen_keys(part: Part, query_of: np.ndarray) -> Counter[tuple[int, int, int]]:
    """Count how often launches compute attention for each query and each key. An item of the
    counter is (query token, request, position of the key).
    """
    seen: Counter[tuple[int, int, int]] = Counter()
    for chunk in part.chunks:
        for launch in chunk.launches:
            assert part.start <= launch.start < launch.stop <= part.stop
            assert launch.query_ends[-1] == launch.stop - launch.start
            assert launch.kv_ends[-1] == len(launch.kv)
            queries, keys = pairwise([0, *launch.query_ends]), pairwise([0, *launch.kv_ends])
            for (q0, q1), (k0, k1) in zip(queries, keys, strict=True):
                assert not launch.is_causal or q1 - q0 <= k1 - k0
                for query in range(q0, q1):
                    last = k1 - (q1 - 1 - query) if launch.is_causal else k1
                    for kv in launch.kv[k0:last]:
                        key = int(chunk.requests[kv]), int(chunk.positions[kv])
                        seen[int(query_of[launch.start + query]), *key] += 1
    return seen


@given(STEPS, st.integers(1, 4), st.integers(1, 50), st.booleans())
def test_every_query_sees_every_key_up_to_its_own_once(
    step: list[tuple[int, int]], num_ranks: int, max_tokens: int, cuts: bool
) -> None:
    query_lens = np.array([q for q, _ in step], np.int32)
    kv_lens = np.array([q + c for q, c in step], np.int32)
    split = PromptSplit.of(query_lens, num_ranks)
    seen: Counter[tuple[int, int, int]] = Counter()
    chunks = set()
    for rank in range(num_ranks):
        parts = plan_parts(query_lens, kv_lens, split, rank, max_tokens, cuts_requests=cuts)
        chunks.add(
            str([[(c.requests.tolist(), c.positions.tolist()) for c in p.chunks] for p in parts])
        )
        for part in parts:
            assert cuts or len(part.chunks) == 1
            seen += seen_keys(part, split.tokens_of(rank))
    assert len(chunks) == 1, "ranks read different keys"
    ends = np.cumsum(query_lens)
    wanted = Counter(
        (int(token), request, position)
        for request, (length, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True))
        for index, token in enumerate(range(ends[request] - length, ends[request]))
        if token >= split.num_whole_tokens
        for position in range(kv_len - length + index + 1)
    )
    assert seen == wanted


@given(STEPS, st.integers(1, 50))
def test_chunks_are_no_longer_than_asked_for(step: list[tuple[int, int]], max_tokens: int) -> None:
    query_lens = np.array([q for q, _ in step], np.int32)
    kv_lens = np.array([q + c for q, c in step], np.int32)
    split = PromptSplit.of(query_lens, 2)
    for part in plan_parts(query_lens, kv_lens, split, 0, max_tokens):
        assert all(len(chunk.positions) <= max_tokens for chunk in part.chunks)


@given(STEPS, st.integers(1, 4), st.integers(1, 50), st.sampled_from([1, 2, 4]))
def test_launches_find_the_keys_that_shards_read_together(
    step: list[tuple[int, int]], count: int, max_tokens: int, interleave: int
) -> None:
    shards = Shards(4, count, interleave)
    query_lens = np.array([q for q, _ in step], np.int32)
    kv_lens = np.array([q + c for q, c in step], np.int32)
    width = -(-int(kv_lens.max()) // shards.tokens_per_block)
    table = np.random.default_rng(0).permutation(len(step) * width).reshape(-1, width) + 1
    split = PromptSplit.of(query_lens, 1)
    # For each shard, the token in each slot, as (request, position).
    held = {}
    for request, length in enumerate(kv_lens):
        positions = np.arange(length)
        slots = shards.slots(table, np.full(length, request), positions)
        for position, owner, slot in zip(positions, shards.owners(positions), slots, strict=True):
            held[int(owner), int(slot)] = request, int(position)
    for part in plan_parts(query_lens, kv_lens, split, 0, max_tokens):
        for chunk in part.chunks:
            reads = [find_keys(chunk, table, shards, shard) for shard in range(count)]
            if count == 1:
                read = None
            else:
                # type: ignore[union-attr]
                read = [(s, int(slot)) for s, r in enumerate(reads) for slot in r.own]
            for launch, index in zip(chunk.launches, reads[-1].launches, strict=True):
                places = [(0, int(i)) if read is None else read[i] for i in index]
                wanted = zip(chunk.requests[launch.kv], chunk.positions[launch.kv], strict=True)
                assert [held[place] for place in places] == [(int(r), int(p)) for r, p in wanted]
