"""The exchanges inside attention between ranks that share a request's context.

A DCP group keeps each token's KV on one of its ranks. To decode, its ranks gather the queries of
all of their heads. Each rank attends to its own shard, and sends the results to the ranks of each
head, which merge them by the sums of the softmax. For prompts the ranks gather the keys of the
request instead. The ranks of a PCP group send each other the new keys of their prompt tokens.

No shape and no collective here depends on the contents of one shard, so ranks cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dist_aclgraph.comm.groups import ALONE, CommGroup, RankGroups

ALIGNED_FLOATS = 8  # kernels load blocks of 32 bytes
# The log of a sum over no keys. It is not minus infinity, because npu_attention_update would give
# NaN if all shares are empty.
NOTHING = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class ContextParallel:
    """The part of one rank.

    Attributes:
        dcp: ranks that share a request's KV, ordered by PCP rank, then by heads.
        pcp: ranks that share the computation of its prompt; all of them are in ``dcp``, unless that
            is a group of one.
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
        """Ranks of ``dcp`` with different query heads; the other ranks repeat these heads."""
        return self.dcp.size // self.pcp.size if self.is_sharded else 1

    def meet(self, device: torch.device) -> None:
        """Run a first collective in each group, so that HCCL makes its domains and takes their
        streams now.

        Otherwise the first prompt would make PCP's domain, after the streams were counted.
        """
        for group in (self.dcp, self.pcp):
            group.all_gather(torch.zeros(ALIGNED_FLOATS, device=device))

    def gather_new(self, rows: Tensor, num_rows: int) -> Tensor:
        """Return the first rows of every PCP rank, [ranks * num_rows, ...], in rank order."""
        return self.pcp.all_gather(rows[:num_rows].contiguous()).flatten(0, 1)

    def gather_heads(self, q: Tensor) -> Tensor:
        """[n, heads, d] -> [n, head ranks * heads, d]: the queries of all heads of the group."""
        size = self.num_head_ranks
        if size == 1:
            return q
        every = self.dcp.all_gather(q.contiguous())[:size]
        # With one head, flatten would give a view, which operators do not accept.
        return every.transpose(0, 1).flatten(1, 2).contiguous()

    def merge(self, out: Tensor, sums: Tensor, is_empty: Tensor) -> Tensor:
        """Exchange the results of shards, and merge them for this rank's heads.

        Args:
            out: [n, head ranks * heads, d]; sums: [n, head ranks * heads, 1] float32, logs of the
                summed exponentials.
            is_empty: [n, 1, 1] bool, rows of which this shard keeps nothing: there ``out`` and
                ``sums`` are meaningless.

        Returns:
            [n, heads, d] float32; zero if all shards are empty.
        """
        n, d, size = len(out), out.shape[2], self.num_head_ranks
        out = out.float().masked_fill(is_empty, 0)
        sums = sums.masked_fill(is_empty, NOTHING)
        # Ordered by receiver: first the outputs of its heads, then their sums.
        outs, logs = (x.reshape(n, size, -1).transpose(0, 1).flatten(1) for x in (out, sums))
        count = logs.shape[1]
        sent = torch.cat([outs, pad(logs, (0, -count % ALIGNED_FLOATS))], 1)
        copies = self.pcp.size  # ranks with the same heads
        if copies > 1:
            sent = sent.expand(copies, -1, -1).flatten(0, 1)
        received = self.dcp.all_to_all(sent.contiguous())
        width = outs.shape[1]
        parts = [row[:width].view(-1, d) for row in received]
        merged, _ = merge_attention(parts, [row[width : width + count] for row in received])
        return merged.view(n, -1, d)

    def gather_keys(self, caches: Sequence[Tensor], own: Tensor) -> Tensor:
        """Return rows of all shards, [shards * m, width], as ``find_keys`` counts them.

        Args:
            caches: [num_slots, ...] each, of this shard; their rows are joined side by side.
            own: [m] slots to read here.
        """
        rows = [cache.index_select(0, own).flatten(1) for cache in caches]
        return self.dcp.all_gather(torch.cat(rows, 1)).flatten(0, 1)


UNDIVIDED = ContextParallel()


def merge_attention(outs: Sequence[Tensor], sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention over several sets of keys, and its log-sum-exps.

    Args:
        outs: [rows, d] each, attention over one set; sums: [rows] float32 each.
    """
    merged: tuple[Tensor, Tensor] = torch.ops.npu.npu_attention_update(list(sums), list(outs), 1)
    return merged
