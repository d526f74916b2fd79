"""Every rank runs this script. It captures two layers of attention, once with a sharded cache and
once with a cache that is not sharded.

The script prints a list. Each entry contains the kind of attention, the number of tokens, whether
the cache is sharded, and four counts: operators per layer, collectives per layer, unaligned views
among the inputs of launches, and launches on the AI CPU. Arguments: tp pcp dcp.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from dist_aclgraph.comm.groups import make_groups
from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.device import emulator
from dist_aclgraph.layers.attention import (
    AttentionMetadata,
    DeviceRows,
    KVCache,
    PagedAttention,
    ShardRows,
    make_causal_mask,
)
from dist_aclgraph.layers.context_parallel import UNDIVIDED, ContextParallel
from dist_aclgraph.layers.latent_attention import LatentAttention, LatentCache
from dist_aclgraph.layers.sparse_attention import IndexRows, SparseCache, SparseLatentAttention
from dist_aclgraph.topology import ParallelLayout

TP, PCP, DCP = map(int, sys.argv[1:])
HEADS, LAYERS, BLOCKS, BLOCK_SIZE = 2, 2, 4, 128
INDEX_HEADS, TOP_K = 4, 8

dist.init_process_group("hccl")
groups = make_groups(ParallelLayout(tp=TP, pcp=PCP, dcp=DCP), dist.get_rank())


def random(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16).npu()


def make_metadata(n, slot_dtype, *, is_sharded):
    return AttentionMetadata(
        num_tokens=n,
        written=torch.arange(n, dtype=slot_dtype).npu(),
        block_table=torch.ones((n, 1), dtype=torch.int32).npu(),
        query_ends=list(range(1, n + 1)),
        kv_lens=[7] * n,
        causal_mask=make_causal_mask(torch.device("npu")),
        is_causal=False,
        is_empty=torch.zeros((n, 1, 1), dtype=torch.bool).npu() if is_sharded else None,
    )


def grouped(n, context):
    attention = PagedAttention(HEADS, 1, 128, context)
    q, k, v, out = (random(n, heads, 128) for heads in (HEADS, 1, 1, HEADS))
    cache = KVCache(*(random(BLOCKS, BLOCK_SIZE, 1, 128) for _ in range(2)))
    metadata = make_metadata(n, torch.int32, is_sharded=context.is_sharded)
    return lambda: attention(q, k, v, out, cache, metadata)


def latent(n, context):
    weights = random(512), random(HEADS, 128, 512), random(HEADS, 128, 512)
    attention = LatentAttention(*weights, 0.1, context)
    q, q_rope, out = random(n, HEADS, 128), random(n, HEADS, 64), random(n, HEADS, 128)
    rope = random(n, 1, 1, 64), random(n, 1, 1, 64)
    cache = LatentCache(random(BLOCKS, BLOCK_SIZE, 1, 512), random(BLOCKS, BLOCK_SIZE, 1, 64))
    metadata = make_metadata(n, torch.int64, is_sharded=context.is_sharded)
    kv = random(n, 576)
    return lambda: attention(q, q_rope, kv, out, rope, cache, metadata)


def sparse(n, context):
    shards = Shards(BLOCK_SIZE, context.dcp.size, 16)
    weights = random(512), random(HEADS, 128, 512), random(HEADS, 128, 512)
    attention = SparseLatentAttention(*weights, 0.1, TOP_K, context)
    q, q_rope, out = random(n, HEADS, 128), random(n, HEADS, 64), random(n, HEADS, 128)
    rope = random(n, 1, 1, 64), random(n, 1, 1, 64)
    cache = SparseCache(
        random(BLOCKS, BLOCK_SIZE, 1, 512),
        random(BLOCKS, BLOCK_SIZE, 1, 64),
        random(BLOCKS, shards.tokens_per_block, 1, 128),
    )
    metadata = make_metadata(n, torch.int64, is_sharded=False)
    ends = torch.arange(1, n + 1, dtype=torch.int32).npu()
    rows = DeviceRows(ends, torch.full_like(ends, 7), metadata.written.int().unsqueeze(1))
    on_shards = None
    if context.is_sharded:
        place = ContextPlace(shards, context.dcp.rank)
        on_shards = ShardRows(place, metadata.block_table, ends[-1:].clone())
    metadata = replace(metadata, on_device=rows, on_shards=on_shards)
    kv = random(n, 576)
    index = IndexRows(random(n, INDEX_HEADS, 128), random(n, 128), random(n, INDEX_HEADS))
    return lambda: attention(q, q_rope, kv, out, index, rope, cache, metadata, None)


def count(run):
    run()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        for _ in range(LAYERS):
            run()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        graph.debug_dump(file.name)
        names = [node["name"] for node in json.loads(Path(file.name).read_text())]
    before = emulator.counters()
    run()
    torch.npu.synchronize()
    after = emulator.counters()
    return {
        "operators": sum(name.startswith("aclnn") for name in names) / LAYERS,
        "collectives": sum(name.startswith("Hccl") for name in names) / LAYERS,
        "unaligned": after["unaligned_views"] - before["unaligned_views"],
        "ai_cpu": after["ai_cpu"] - before["ai_cpu"],
    }


found = [
    {
        "kind": make.__name__,
        "tokens": n,
        "is_sharded": context.is_sharded,
        **count(make(n, context)),
    }
    for make in (grouped, latent, sparse)
    for n in (1, 2, 4)
    for context in (UNDIVIDED, ContextParallel.of(groups))
]
print("RESULT " + json.dumps(found))
