"""The attention metadata of a step, made once and used by all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.prompt_parts import MAX_CHUNK_TOKENS, Part, Reads, find_keys, plan_parts
from dist_aclgraph.context.prompt_split import MAX_WHOLE_QUERIES, PromptSplit
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.upload import upload_arrays
from dist_aclgraph.graphs.device_step import DeviceStep
from dist_aclgraph.ints import IntArray
from dist_aclgraph.layers.attention import (
    AttentionMetadata,
    AttentionTasks,
    DeviceRows,
    make_causal_mask,
)
from dist_aclgraph.layers.prompt_attention import DeviceChunk, DeviceLaunch, DevicePart
from dist_aclgraph.models.attention_kind import PagedKind
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.direct_rows import direct_rows
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.padding import Lens, shard_lens


class AttentionSteps:
    """Makes metadata for one kind of attention on one rank. Owns the causal mask.

    Args:
        max_queries: a request with more queries does not attend directly, if the cache is sharded
            or this kind of attention does not accept long queries.
        max_tokens: number of tokens whose keys are read together for requests that do not attend
            directly.
    """

    def __init__(
        self,
        kind: PagedKind,
        place: ContextPlace,
        npu: Npu,
        *,
        max_queries: int = MAX_WHOLE_QUERIES,
        max_tokens: int = MAX_CHUNK_TOKENS,
    ) -> None:
        self._max_queries, self._max_tokens = max_queries, max_tokens
        self._kind, self._place, self._npu = kind, place, npu
        self._causal_mask = make_causal_mask(npu.device)

    def of_graph(
        self,
        graph: BatchDescriptor,
        inputs: DeviceStep,
        lens: Lens,
        tasks: AttentionTasks | None,
        *,
        iteration: int = 0,
        written: Tensor | None = None,
    ) -> AttentionMetadata:
        """Return the metadata of a full graph, from its static inputs.

        Args:
            tasks: records the operators of the captured graph; None runs them eagerly.
            iteration: iteration of drafting; each iteration makes all requests one token longer.
            written: [num_tokens] int32, slots of the cache write; None means the inputs' slots.
        """
        block_table, query_len = inputs.block_table, graph.query_len
        written = inputs.slots if written is None else written
        on_device = None
        if self._kind.reads_device_rows:
            assert query_len, "graphs of mixed batches have no lengths on the device"
            positions = inputs.positions.view(-1, query_len)
            # Lengths are computed from first positions, because a view of last positions would
            # begin at an address that operators read slowly.
            device_lens = positions[:, 0] + (query_len + iteration)
            on_device = _uniform_rows(positions, device_lens, written)
        if self._place.is_sharded and query_len > 1:
            block_table = block_table.repeat_interleave(query_len, 0)
        return AttentionMetadata(
            num_tokens=graph.num_tokens,
            written=self._slots(written),
            block_table=block_table,
            query_ends=lens.query_ends,
            kv_lens=lens.kv_lens[iteration],
            causal_mask=self._causal_mask,
            is_causal=query_len != 1 and not self._place.is_sharded,
            is_empty=self._is_empty(inputs.positions, iteration),
            on_device=on_device,
            tasks=tasks,
        )

    def of_step(self, inputs: HostStep, step: DeviceStep) -> AttentionMetadata:
        """Return the metadata of any mixture of live requests.

        Args:
            inputs: the step's arrays on the host.
            step: the same arrays on the device; the tokens may be padded.
        """
        query_lens = np.diff(inputs.query_ends, prepend=np.int32(0))
        place, prompts = self._place, inputs.prompts
        if prompts is None:
            split, rank = PromptSplit.of(query_lens, 1, self._max_queries), 0
        else:
            split, rank = prompts.split, prompts.rank
        rows = direct_rows(inputs, split, place, takes_long_queries=self._kind.takes_long_queries)
        parts: tuple[Part, ...] = ()
        if place.is_sharded or not self._kind.takes_long_queries:
            parts = plan_parts(query_lens, inputs.kv_lens, split, rank, self._max_tokens)
        arrays: list[IntArray] = []
        if prompts is not None:
            arrays += [prompts.written, prompts.positions]
        if rows.requests is not None:
            arrays.append(rows.requests)
        has_device_rows = self._kind.reads_device_rows and bool(rows.query_ends)
        if has_device_rows:
            arrays += [np.array(rows.query_ends, np.int32), np.array(rows.kv_lens, np.int32)]
        reads = self._reads_of(parts, inputs.block_table)
        arrays += [array for each in reads for array in _arrays_of(each)]
        sent = iter(upload_arrays(self._npu, arrays) if arrays else [])
        written, written_rope, num_exchanged = step.slots[: inputs.num_tokens], None, 0
        if prompts is not None:
            written, positions = next(sent), next(sent)
            num_exchanged = split.num_tokens
            if self._kind.ropes_written:
                written_rope = self._kind.rope(positions)
        block_table = step.block_table
        if rows.requests is not None:
            block_table = block_table.index_select(0, next(sent))
        on_device = None
        if has_device_rows:
            on_device = DeviceRows(next(sent), next(sent), _index_slots(written))
        return AttentionMetadata(
            num_tokens=inputs.num_tokens,
            written=self._slots(written),
            num_exchanged=num_exchanged,
            written_rope=written_rope,
            block_table=block_table[: len(rows.query_ends)],
            query_ends=rows.query_ends,
            kv_lens=rows.kv_lens,
            causal_mask=self._causal_mask,
            is_causal=rows.num_tokens > len(rows.query_ends),
            is_empty=self._is_empty(step.positions[: rows.num_tokens]),
            on_device=on_device,
            parts=_on_device(parts, reads, sent),
        )

    def of_drafts(
        self, positions: Tensor, written: Tensor, block_table: Tensor, inputs: HostStep, ahead: int
    ) -> AttentionMetadata:
        """Return the metadata of an iteration of drafting after a mixed step, over all sampled
        places.

        Args:
            positions: [num_samples, k + 1] int32, the places of live requests, without ``ahead``.
            written: [num_samples * (k + 1)] int32, slots.
            block_table: [num_samples, max_blocks].
            ahead: number of tokens by which drafting has made requests longer since the step.
        """
        assert inputs.drafts is not None
        at = inputs.drafts.positions
        num_reqs, num_places = at.shape
        num_tokens = num_reqs * num_places
        if self._place.is_sharded:
            query_ends = list(range(1, num_tokens + 1))
            kv_lens = shard_lens(self._place, at.ravel() + 1 + ahead).tolist()
            block_table = block_table.repeat_interleave(num_places, 0)
        else:
            query_ends = list(range(num_places, num_tokens + 1, num_places))
            kv_lens = (at[:, -1] + 1 + ahead).tolist()
        on_device = None
        if self._kind.reads_device_rows and num_reqs:
            device_lens = (positions[:, -1] + 1).clamp(min=num_places) + ahead
            on_device = _uniform_rows(positions, device_lens, written)
        return AttentionMetadata(
            num_tokens=num_tokens,
            written=self._slots(written),
            block_table=block_table,
            query_ends=query_ends,
            kv_lens=kv_lens,
            causal_mask=self._causal_mask,
            is_causal=not self._place.is_sharded,
            is_empty=self._is_empty(positions.reshape(-1), ahead),
            on_device=on_device,
        )

    def _slots(self, slots: Tensor) -> Tensor:
        """Return slots for the cache write: -1 for tokens that this rank does not write."""
        if self._place.is_sharded:
            slots = slots.clamp(min=-1)
        return slots.to(self._kind.slot_dtype)

    def _is_empty(self, positions: Tensor, ahead: int = 0) -> Tensor | None:
        """[n] -> [n, 1, 1], whether a token sees no key of this shard."""
        if not self._place.is_sharded:
            return None
        first = self._place.shards.first_position(self._place.shard)
        return (positions < first - ahead).view(-1, 1, 1)

    def _reads_of(self, parts: Sequence[Part], block_table: IntArray) -> list[Reads]:
        """Return where each chunk's keys are in the cache, for the chunks of all parts in order."""
        place = self._place
        return [
            find_keys(chunk, block_table, place.shards, place.shard)
            for part in parts
            for chunk in part.chunks
        ]


def _uniform_rows(positions: Tensor, kv_lens: Tensor, slots: Tensor) -> DeviceRows:
    """Return the rows of requests with equally many queries, computed on the device.

    Args:
        positions: [num_reqs, query_len].
        kv_lens: [num_reqs] int32. The KV length of a padding request covers its queries, as on the
            host.
        slots: [num_tokens] int32.
    """
    num_reqs, query_len = positions.shape
    ends = torch.arange(
        query_len, num_reqs * query_len + 1, query_len, dtype=torch.int32, device=positions.device
    )
    return DeviceRows(ends, kv_lens, _index_slots(slots))


def _index_slots(slots: Tensor) -> Tensor:
    """[n] -> [n, 1], with padding in the dummy block."""
    return slots.clamp(min=0).unsqueeze(1)


def _arrays_of(reads: Reads) -> list[IntArray]:
    return [*([] if reads.own is None else [reads.own]), *reads.launches]


def _on_device(
    parts: Sequence[Part], reads: Sequence[Reads], sent: Iterator[Tensor]
) -> tuple[DevicePart, ...]:
    """Return the prompt parts with tensors on the device in place of the host's arrays.

    Args:
        sent: for all reads in order, the arrays of ``_arrays_of`` as tensors.
    """
    each = iter(reads)
    return tuple(
        DevicePart(
            part.start,
            part.stop,
            tuple(
                DeviceChunk(
                    None if next(each).own is None else next(sent),
                    tuple(DeviceLaunch(launch, next(sent)) for launch in chunk.launches),
                )
                for chunk in part.chunks
            ),
        )
        for part in parts
    )
