"""How the lengths of a step fill up a full graph: pure functions, with their invariants.

Always: as many query ends as KV lengths as requests of the graph, query ends that do not decrease
and end at the graph's tokens, KV lengths of at least one.
"""

from __future__ import annotations

from dist_aclgraph.ints import IntArray
from dist_aclgraph.planning.descriptor import BatchDescriptor

PADDING_KV_LEN = 1

Lens = tuple[list[int], list[int]]  # cumulative query lengths and KV lengths, [num_reqs] each


def pad_lens(graph: BatchDescriptor, query_ends: IntArray, kv_lens: IntArray) -> Lens:
    """Return the lengths of a step, padded to what ``graph`` was captured for.

    Args:
        query_ends, kv_lens: [num_reqs] of the live requests.
    """
    if graph.query_len:
        return _pad_uniform(graph, kv_lens)
    return _pad_mixed(graph, query_ends, kv_lens)


def padding_blocks(graph: BatchDescriptor, num_tokens: int, num_reqs: int, block_size: int) -> int:
    """Return how many blocks the KV lengths of a full graph's padding requests stand for.

    Args:
        num_tokens, num_reqs: of the live requests.
    """
    missing = graph.num_reqs - num_reqs
    if missing == 0:
        return 0
    share = graph.query_len or -(-(graph.num_tokens - num_tokens) // missing)
    return missing * -(-max(share, PADDING_KV_LEN) // block_size)


def _pad_uniform(graph: BatchDescriptor, kv_lens: IntArray) -> Lens:
    # Every padding request keeps the query length; its KV length covers its queries.
    missing = graph.num_reqs - len(kv_lens)
    q = graph.query_len
    ends = list(range(q, graph.num_tokens + 1, q))
    return ends, kv_lens.tolist() + [max(q, PADDING_KV_LEN)] * missing


def _pad_mixed(graph: BatchDescriptor, query_ends: IntArray, kv_lens: IntArray) -> Lens:
    # The padding tokens are divided among the padding requests.
    ends, lens = query_ends.tolist(), kv_lens.tolist()
    end = ends[-1] if ends else 0
    missing = graph.num_reqs - len(ends)
    share = -(-(graph.num_tokens - end) // missing) if missing else 0
    for _ in range(missing):
        length = min(share, graph.num_tokens - end)
        end += length
        ends.append(end)
        lens.append(max(length, PADDING_KV_LEN))
    return ends, lens
