"""Makes the attention metadata of a step. All layers use the same metadata."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.prompt_parts import (
    MAX_CHUNK_TOKENS,
    KeyChunk,
    Launch,
    Part,
    Reads,
    find_keys,
    plan_parts,
)
from dist_aclgraph.context.prompt_split import MAX_WHOLE_QUERIES, PromptSplit
from dist_aclgraph.context.shards import FOREIGN_SLOT
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.upload import upload_arrays
from dist_aclgraph.graphs.device_step import DeviceStep
from dist_aclgraph.layers.attention import (
    AttentionMetadata,
    AttentionTasks,
    DeviceRows,
    ShardRows,
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
        max_queries: maximum number of query tokens of a request for which attention always reads
            the cache directly, through the request's block table. If a request has more query
            tokens, its keys are gathered first in two cases: the cache is sharded, or this kind of
            attention accepts only few query tokens.
        max_tokens: maximum number of KV tokens whose keys are gathered together.
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
        # This rank's indices in context parallelism, for requests whose attention reads the cache
        # directly. Such requests read the KV cache. If an indexer chooses keys, such requests read
        # the cache of index keys instead. The cache of index keys is not divided: every rank has
        # all index keys.
        self._rows_place = place.whole if kind.chooses_keys else place
        self._remaps_choices = kind.chooses_keys and place.is_sharded
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
        kv_len: int = 0,
    ) -> AttentionMetadata:
        """Return the metadata of a full graph, from its static inputs.

        Args:
            lens: query lengths and KV lengths with which the attention operators are captured or
                run.
            tasks: records the operators of the captured graph; if None, the operators run eagerly.
            iteration: index of the iteration of drafting. Each iteration makes all requests one
                token longer.
            written: [num_tokens] int32, the slots to which KV is written; None means the slots of
                ``inputs``.
            kv_len: the number of keys that each request reads in a graph whose lengths are never
                updated. The number is a multiple of the block size. It is 0 for other graphs.
        """
        if kv_len:
            return self._of_padded(graph, inputs, kv_len)
        block_table, query_len = inputs.block_table, graph.query_len
        written = inputs.slots if written is None else written
        by_token = block_table
        if self._place.is_sharded and query_len > 1:
            by_token = block_table.repeat_interleave(query_len, 0)
        is_sharded = self._rows_place.is_sharded
        on_device = None
        if self._kind.reads_device_rows:
            on_device = self._rows_of_graph(inputs, query_len, iteration, written)
        return AttentionMetadata(
            num_tokens=graph.num_tokens,
            written=self._slots(written),
            block_table=by_token if is_sharded else block_table,
            query_ends=lens.query_ends,
            kv_lens=lens.kv_lens[iteration],
            causal_mask=self._causal_mask,
            is_causal=query_len != 1 and not is_sharded,
            is_empty=self._is_empty(inputs.positions, iteration),
            on_device=on_device,
            on_shards=self._shard_rows(by_token),
            tasks=tasks,
        )

    def _of_padded(
        self, graph: BatchDescriptor, inputs: DeviceStep, kv_len: int
    ) -> AttentionMetadata:
        """Return a decode graph's metadata if its lengths are never updated; see ``of_graph``."""
        n = graph.num_tokens
        index = torch.arange(kv_len, dtype=torch.int32, device=self._npu.device)
        hidden = index > inputs.positions.view(n, 1)
        num_blocks = kv_len // self._place.shards.tokens_per_block
        return AttentionMetadata(
            num_tokens=n,
            written=self._slots(inputs.slots),
            # The block table is cut to the blocks that the mask covers, because the table and the
            # mask must cover the same number of keys.
            block_table=inputs.block_table[:, :num_blocks].contiguous(),
            query_ends=list(range(1, n + 1)),
            kv_lens=[kv_len] * n,
            causal_mask=self._causal_mask,
            is_causal=False,
            hidden_keys=hidden.view(n, 1, 1, kv_len),
        )

    def of_step(self, inputs: HostStep, step: DeviceStep) -> AttentionMetadata:
        """Return the metadata of a step that replays no full graph. Its requests can have any
        numbers of query tokens.

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
        takes_long = self._kind.takes_long_queries
        rows = direct_rows(inputs, split, self._rows_place, takes_long_queries=takes_long)
        tokens = None
        if self._remaps_choices:
            tokens = direct_rows(inputs, split, place, takes_long_queries=takes_long)
        parts: tuple[Part, ...] = ()
        if place.is_sharded or not takes_long:
            # If an indexer chooses keys, requests are not cut into chunks: the attention operator
            # must get all keys of a request in one call.
            parts = plan_parts(
                query_lens,
                inputs.kv_lens,
                split,
                rank,
                self._max_tokens,
                cuts_requests=not self._kind.chooses_keys,
            )
        chunks = [chunk for part in parts for chunk in part.chunks]
        reads = [
            find_keys(chunk, inputs.block_table, place.shards, place.shard) for chunk in chunks
        ]
        arrays: list[IntArray] = []
        if prompts is not None:
            arrays += [prompts.written, prompts.positions]
        if rows.requests is not None:
            arrays.append(rows.requests)
        if tokens is not None and tokens.requests is not None:
            arrays.append(tokens.requests)
        is_idle = inputs.num_tokens == 0 and prompts is None
        has_device_rows = self._kind.reads_device_rows and not is_idle
        if has_device_rows:
            arrays += [np.array(rows.query_ends, np.int32), np.array(rows.kv_lens, np.int32)]
        for chunk, each in zip(chunks, reads, strict=True):
            arrays += self._arrays_of(chunk, each)
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
        on_shards = None
        if tokens is not None and tokens.num_tokens:
            by_token = step.block_table
            if tokens.requests is not None:
                by_token = by_token.index_select(0, next(sent))
            on_shards = self._shard_rows(by_token[: tokens.num_tokens])
        on_device = None
        if has_device_rows:
            slots = self._index_slots(written)
            num_seen = self._num_seen(step.positions[: rows.num_tokens])
            on_device = DeviceRows(next(sent), next(sent), slots, num_seen)
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
            on_shards=on_shards,
            parts=self._on_device(parts, reads, sent),
        )

    def of_drafts(
        self, positions: Tensor, written: Tensor, block_table: Tensor, inputs: HostStep, ahead: int
    ) -> AttentionMetadata:
        """Return the metadata of one iteration of drafting after a mixed step. A place is a token
        after which the step has sampled. Each place has one query token.

        Args:
            positions: [num_samples, k + 1] int32, positions of the live requests' places in the
                step; ``ahead`` is not added yet.
            written: [num_samples * (k + 1)] int32, the slots to which KV is written.
            block_table: [num_samples, max_blocks], the blocks of the sampled requests.
            ahead: number of tokens by which drafting has made each request longer since the step.
        """
        assert inputs.drafts is not None
        at = inputs.drafts.positions
        num_reqs, num_places = at.shape
        num_tokens = num_reqs * num_places
        by_token = block_table
        if self._place.is_sharded:
            by_token = block_table.repeat_interleave(num_places, 0)
        if self._rows_place.is_sharded:
            query_ends = list(range(1, num_tokens + 1))
            kv_lens = shard_lens(self._place, at.ravel() + 1 + ahead).tolist()
            block_table = by_token
        else:
            query_ends = list(range(num_places, num_tokens + 1, num_places))
            kv_lens = (at[:, -1] + 1 + ahead).tolist()
        on_device = None
        if self._kind.reads_device_rows and num_reqs:
            device_lens = (positions[:, -1] + 1).clamp(min=num_places) + ahead
            on_device = self._uniform_rows(positions, device_lens, written, ahead)
        return AttentionMetadata(
            num_tokens=num_tokens,
            written=self._slots(written),
            block_table=block_table,
            query_ends=query_ends,
            kv_lens=kv_lens,
            causal_mask=self._causal_mask,
            is_causal=not self._rows_place.is_sharded,
            is_empty=self._is_empty(positions.reshape(-1), ahead),
            on_device=on_device,
            on_shards=self._shard_rows(by_token) if num_reqs else None,
        )

    def _slots(self, slots: Tensor) -> Tensor:
        """Return the slots to which this rank writes KV; -1 for all other tokens."""
        if self._place.is_sharded:
            slots = slots.clamp(min=-1)
        return slots.to(self._kind.slot_dtype)

    def _index_slots(self, slots: Tensor) -> Tensor:
        """Return the tokens' slots in the cache of the indexer, [n] -> [n, 1]. Every rank keeps the
        whole cache of the indexer.

        Padding gets a slot of the dummy block.
        """
        place = self._place
        if place.is_sharded:
            whole = place.shards.whole_of(slots, place.shard)
            slots = torch.where(slots < 0, FOREIGN_SLOT - slots, whole)
        return slots.clamp(min=0).unsqueeze(1)

    def _is_empty(self, positions: Tensor, ahead: int = 0) -> Tensor | None:
        """Return [n, 1, 1] booleans: true for a token if all keys to which the token may attend are
        on other shards.
        """
        if not self._rows_place.is_sharded:
            return None
        first = self._place.shards.first_position(self._place.shard)
        return (positions < first - ahead).view(-1, 1, 1)

    def _shard_rows(self, block_table: Tensor) -> ShardRows | None:
        """Return the data that attention needs if an indexer chooses keys of a sharded cache.
        Return None if this kind of attention chooses no keys, or if the cache is not sharded.

        Args:
            block_table: [n, max_blocks], the blocks of each token's request.
        """
        if not self._remaps_choices:
            return None
        n = len(block_table)
        return ShardRows(self._place, block_table, block_table.new_full((1,), n))

    def _num_seen(self, positions: Tensor, ahead: int = 0) -> Tensor | None:
        """Return the number of keys to which each query attends; None if an indexer chooses the
        keys.

        Args:
            positions: positions of the queries, in any shape.
            ahead: number of tokens by which drafting has made requests longer.
        """
        return None if self._kind.chooses_keys else positions.reshape(-1) + (1 + ahead)

    def _uniform_rows(
        self, positions: Tensor, kv_lens: Tensor, slots: Tensor, ahead: int = 0
    ) -> DeviceRows:
        """Compute the attention metadata of requests with equal numbers of query tokens, on the
        device.

        Args:
            positions: [num_reqs, query_len].
            kv_lens: [num_reqs] int32, number of keys of each request. For every request, also for a
                padding request, the number includes the keys of the request's own queries.
            slots: [num_tokens] int32.
            ahead: number of tokens by which drafting has made requests longer.
        """
        num_reqs, query_len = positions.shape
        stop, device = num_reqs * query_len + 1, positions.device
        ends = torch.arange(query_len, stop, query_len, dtype=torch.int32, device=device)
        num_seen = self._num_seen(positions, ahead)
        return DeviceRows(ends, kv_lens, self._index_slots(slots), num_seen)

    def _rows_of_graph(
        self, inputs: DeviceStep, query_len: int, iteration: int, written: Tensor
    ) -> DeviceRows:
        """Return the attention metadata of a full graph's rows, from its static inputs; see
        ``of_graph``.
        """
        if query_len == 0:
            ends, lens = inputs.query_ends, inputs.kv_lens
            assert ends is not None and lens is not None and iteration == 0
            return DeviceRows(ends, lens, self._index_slots(written))
        positions = inputs.positions.view(-1, query_len)
        # The lengths are computed from the first position of each request. A view of the last
        # positions would begin at an unaligned address, and operators would read the view slowly.
        device_lens = positions[:, 0] + (query_len + iteration)
        return self._uniform_rows(positions, device_lens, written, iteration)

    def _arrays_of(self, chunk: KeyChunk, reads: Reads) -> Iterator[IntArray]:
        """Yield a chunk's arrays for the device, in the order that ``_on_device`` expects."""
        if reads.own is not None:
            yield reads.own
        for launch, keys in zip(chunk.launches, reads.launches, strict=True):
            yield keys
            if self._kind.chooses_keys:
                yield np.array(launch.query_ends, np.int32)
                yield np.array(launch.kv_ends, np.int32)

    def _on_device(
        self, parts: Sequence[Part], reads: Sequence[Reads], sent: Iterator[Tensor]
    ) -> tuple[DevicePart, ...]:
        """Copy the arrays of all parts to the device, and return the parts with the copies.

        Args:
            reads: the slots of each chunk's keys, for all chunks of the first part, then of the
                second part, and so on.
            sent: for all chunks in order, the arrays of ``_arrays_of`` as tensors.
        """
        has_ends = self._kind.chooses_keys

        def on_device(launch: Launch) -> DeviceLaunch:
            return DeviceLaunch(launch, next(sent), (next(sent), next(sent)) if has_ends else None)

        each = iter(reads)
        return tuple(
            DevicePart(
                part.start,
                part.stop,
                tuple(
                    DeviceChunk(
                        None if next(each).own is None else next(sent),
                        tuple(map(on_device, chunk.launches)),
                    )
                    for chunk in part.chunks
                ),
            )
            for part in parts
        )
