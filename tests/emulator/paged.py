"""Attention over a paged cache, and a reference in plain float32 torch."""

import math

import torch
import torch_npu


def reference(query, keys, values, heads, kv_heads, causal=False, mask=None):
    """Return attention of queries [rows, heads, D] over keys [length, kv_heads, D], and the
    log-sum-exps [rows, heads].
    """
    group = heads // kv_heads
    keys, values = (t.float().repeat_interleave(group, 1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) / math.sqrt(query.shape[-1])
    rows, length = scores.shape[1:]
    if causal:
        mask = torch.ones(rows, length).triu(length - rows + 1).bool()
    if mask is not None:
        scores = scores.masked_fill(mask, -math.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out, scores.logsumexp(-1).t()


class Pages:
    """A paged cache with random contents. It can return the keys and values of a sequence in the
    order of its tokens.
    """

    def __init__(self, lengths, kv_heads, dim, block_size, dtype):
        columns = max(-(-n // block_size) for n in lengths) + 1
        count = len(lengths) * columns + 2
        self.keys, self.values = (
            torch.randn(count, block_size, kv_heads, dim).to(dtype) for _ in range(2)
        )
        order = torch.randperm(count)[: len(lengths) * columns]
        self.table = order.view(len(lengths), columns).to(torch.int32)
        self.lengths = lengths

    def tokens(self, cache, sequence):
        return self.table_tokens(cache, sequence, self.lengths[sequence])

    def table_tokens(self, cache, sequence, length):
        return cache[self.table[sequence].long()].flatten(0, 1)[:length]


CAUSAL = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def paged_arguments(query, pages, rows, heads, kv_heads, lse=False, **options):
    block_size, dim = pages.keys.shape[1], pages.keys.shape[3]
    return {
        "query": query.npu(),
        "key": pages.keys.npu().view(len(pages.keys), block_size, -1),
        "value": pages.values.npu().view(len(pages.keys), block_size, -1),
        "actual_seq_lengths": torch.tensor(rows).cumsum(0).tolist(),
        "actual_seq_lengths_kv": pages.lengths,
        "block_table": pages.table.npu(),
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "scale": dim**-0.5,
        "input_layout": "TND",
        "block_size": block_size,
        "softmax_lse_flag": lse,
    } | options


def paged_attention(*positional, **options):
    return torch_npu.npu_fused_infer_attention_score(**paged_arguments(*positional, **options))
