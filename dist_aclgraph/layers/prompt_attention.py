"""Attention of requests with many queries to keys that are read chunk by chunk.

``context.prompt_parts`` divides the keys into chunks, and plans the launches of the operator for
each chunk. Each kind of attention has its own function that computes one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.context.prompt_parts import Launch
from dist_aclgraph.layers.context_parallel import NOTHING, ContextParallel, merge_attention


@dataclass(frozen=True)
class DeviceLaunch:
    """One launch of attention, with the indices of its keys.

    Attributes:
        keys: indices of the launch's keys among the gathered rows. If the cache is not sharded,
            nothing is gathered, and ``keys`` contains the slots of the keys.
        ends: int32, the launch's cumulative query lengths and KV lengths, for an operator that
            reads them on the device; None for other operators.
    """

    launch: Launch
    keys: Tensor
    ends: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class DeviceChunk:
    """A chunk of keys that are read together.

    Attributes:
        own: slots on this shard whose rows are sent to all ranks; None if the cache is not sharded.
    """

    own: Tensor | None
    launches: tuple[DeviceLaunch, ...]


@dataclass(frozen=True)
class DevicePart:
    """The queries from ``start`` to ``stop`` among the rank's tokens, and the chunks to which they
    attend.
    """

    start: int
    stop: int
    chunks: tuple[DeviceChunk, ...]


# A function that computes a launch. Its arguments are the launch, the rows of the launch's keys in
# each cache, and two tensors. The first receives the result, [n, heads, d]; the second receives the
# log-sum-exps, [n, heads, 1] float32. The second is None if log-sum-exps are not needed.
AttendTo = Callable[[DeviceLaunch, Sequence[Tensor], Tensor, Tensor | None], None]


def attend_parts(
    parts: Sequence[DevicePart],
    caches: Sequence[Tensor],
    context: ContextParallel,
    attend: AttendTo,
    out: Tensor,
) -> None:
    """Compute the rows of ``out`` that belong to the queries of the parts. All ranks must call this
    function with the same chunks, because a sharded cache is read by collectives.

    Args:
        caches: the tensors of the cache, [num_slots, ...] each.
        out: [num_tokens, heads, d].
    """
    for part in parts:
        total = None if len(part.chunks) == 1 else _Total(part, out)
        for chunk in part.chunks:
            rows_of = _reader(caches, chunk, context)
            for each in chunk.launches:
                launch = each.launch
                queries = out[launch.start : launch.stop]
                if total is None:
                    attend(each, rows_of(each.keys), queries, None)
                    continue
                found = torch.empty_like(queries)
                sums = found.new_empty((*found.shape[:2], 1), dtype=torch.float32)
                attend(each, rows_of(each.keys), found, sums)
                total.add(launch, found, sums)
        if total is not None:
            out[part.start : part.stop].copy_(total.out)


class _Total:
    """The results for one part's queries, merged over all chunks computed so far."""

    def __init__(self, part: DevicePart, out: Tensor) -> None:
        n, heads, _ = out[part.start : part.stop].shape
        self._start = part.start
        self.out = out.new_zeros((n, heads, out.shape[2]), dtype=torch.float32)
        self._sums = self.out.new_full((n, heads), NOTHING)

    def add(self, launch: Launch, found: Tensor, sums: Tensor) -> None:
        rows = slice(launch.start - self._start, launch.stop - self._start)
        out, d = self.out[rows], found.shape[2]
        outs = [x.reshape(-1, d) for x in (out, found.float())]
        merged, logs = merge_attention(outs, [self._sums[rows].flatten(), sums.flatten()])
        out.copy_(merged.view_as(out))
        self._sums[rows] = logs.view(len(out), -1)


def _reader(
    caches: Sequence[Tensor], chunk: DeviceChunk, context: ContextParallel
) -> Callable[[Tensor], list[Tensor]]:
    """Return a function that selects the rows of a launch's keys, one tensor for each cache."""
    if chunk.own is None:
        return lambda keys: [cache.index_select(0, keys) for cache in caches]
    gathered = context.gather_keys(caches, chunk.own)
    widths = [cache[0].numel() for cache in caches]
    shapes = [cache.shape[1:] for cache in caches]

    def pick(keys: Tensor) -> list[Tensor]:
        parts = torch.split(gathered.index_select(0, keys), widths, 1)
        # The result has one tensor for each cache. Columns of one joint tensor would be views,
        # which operators do not accept.
        return [
            part.reshape(len(keys), *shape).contiguous()
            for part, shape in zip(parts, shapes, strict=True)
        ]

    return pick
