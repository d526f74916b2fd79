"""Collectives in attention between ranks that share a request's context.

In a DCP group, each token's KV is on one rank only. In decoding, the ranks of the group gather the
queries of all heads. Each rank computes attention to its shard for all heads. The results of a head
are sent to the ranks that own the head. The owners of a head merge the results of all shards,
weighted by the log-sum-exps of the shards. For prompts, the ranks of the group gather the keys of
the request, not the queries. The ranks of a PCP group send each other the new keys of their prompt
tokens.

Shapes and collectives are the same on all ranks, because they do not depend on the contents of a
shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dist_aclgraph.comm.groups import ALONE, CommGroup, RankGroups

ALIGNED_FLOATS = 8  # 32 bytes, because kernels load blocks of 32 bytes
# The log-sum-exp of attention without keys. With minus infinity, npu_attention_update would return
# NaN if all shards are empty.
NOTHING = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class ContextParallel:
    """The context parallel groups of one rank.

    Attributes:
        dcp: ranks that share a request's KV, sorted by PCP rank; for each PCP rank, sorted by
            heads.
        pcp: ranks that share the computation of a request's prompt. If ``dcp`` has more than one
            rank, it contains all ranks of ``pcp``.
    """

    dcp: CommGroup = ALONE
    pcp: CommGroup = ALONE

    @classmethod
    def of(cls, groups: RankGroups) -> ContextParallel:
        return cls(groups.dcp, groups.pcp)

    @property
    def is_sharded(self) -> bool:
        return self.dcp.size > 1

    @property
    def num_head_ranks(self) -> int:
        """Number of different sets of query heads in ``dcp``. Several ranks can have copies of the
        same set.
        """
        return self.dcp.size // self.pcp.size if self.is_sharded else 1

    def meet(self, device: torch.device) -> None:
        """Run one collective in each group, so that HCCL creates the communicators and their
        streams now.

        Otherwise, HCCL would create the communicator of ``pcp`` at the first prompt, when the free
        streams have already been counted.
        """
        for group in (self.dcp, self.pcp):
            group.all_gather(torch.zeros(ALIGNED_FLOATS, device=device))

    def gather_new(self, rows: Tensor, num_rows: int) -> Tensor:
        """Return the first ``num_rows`` rows of every PCP rank, [ranks * num_rows, ...]."""
        return self.pcp.all_gather(rows[:num_rows].contiguous()).flatten(0, 1)

    def gather_heads(self, q: Tensor) -> Tensor:
        """Gather the queries of all heads: [n, heads, d] -> [n, ``num_head_ranks`` * heads, d]."""
        size = self.num_head_ranks
        if size == 1:
            return q
        every = self.dcp.all_gather(q.contiguous())[:size]
        # With one head, ``flatten`` returns a view that is not contiguous. Operators accept only
        # contiguous tensors.
        return every.transpose(0, 1).flatten(1, 2).contiguous()

    def merge(self, out: Tensor, sums: Tensor, is_empty: Tensor) -> Tensor:
        """Exchange the attention results of all shards, and merge the results for this rank's
        heads.

        Args:
            out: [n, head ranks * heads, d], this shard's results.
            sums: [n, head ranks * heads, 1] float32, log-sum-exps of the attention scores.
            is_empty: [n, 1, 1] bool, true if this shard has no key for the query of a row. Such a
                row of ``out`` and ``sums`` is meaningless.

        Returns:
            [n, heads, d] float32. The result of a query is zero if no shard has a key for the
            query.
        """
        n, d, size = len(out), out.shape[2], self.num_head_ranks
        out = out.float().masked_fill(is_empty, 0)
        sums = sums.masked_fill(is_empty, NOTHING)
        # Each receiving rank gets one row: the results of its heads, then their log-sum-exps.
        outs, logs = (x.reshape(n, size, -1).transpose(0, 1).flatten(1) for x in (out, sums))
        count = logs.shape[1]
        sent = torch.cat([outs, pad(logs, (0, -count % ALIGNED_FLOATS))], 1)
        copies = self.pcp.size  # number of ranks that have the same heads
        if copies > 1:
            sent = sent.expand(copies, -1, -1).flatten(0, 1)
        received = self.dcp.all_to_all(sent.contiguous())
        width = outs.shape[1]
        parts = [row[:width].view(-1, d) for row in received]
        merged, _ = merge_attention(parts, [row[width : width + count] for row in received])
        return merged.view(n, -1, d)

    def gather_keys(self, caches: Sequence[Tensor], own: Tensor) -> Tensor:
        """Return cache rows of all shards, [shards * m, width]: m rows of the first shard, then m
        rows of the second shard, and so on.

        Args:
            caches: this shard's tensors, [num_slots, ...]. Each returned row contains the rows of
                one slot in all tensors.
            own: [m], the slots of this shard whose rows are read.
        """
        rows = [cache.index_select(0, own).flatten(1) for cache in caches]
        return self.dcp.all_gather(torch.cat(rows, 1)).flatten(0, 1)


UNDIVIDED = ContextParallel()


def merge_attention(outs: Sequence[Tensor], sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the results of attention over several sets of keys. Return the merged results and their
    log-sum-exps.

    Args:
        outs: for each set of keys, the results of attention over the set, [rows, d].
        sums: for each set of keys, the log-sum-exps, [rows] float32.
    """
    merged: tuple[Tensor, Tensor] = torch.ops.npu.npu_attention_update(list(sums), list(outs), 1)
    return merged
