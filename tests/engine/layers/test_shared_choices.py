"""Sparse attention of several ranks that share contexts is compared with sparse attention of one
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.attention_steps import AttentionSteps
from dist_aclgraph.graphs.device_step import DeviceStep
from dist_aclgraph.layers.attention import ShardRows
from dist_aclgraph.layers.context_parallel import UNDIVIDED, ContextParallel
from dist_aclgraph.layers.sparse_attention import (
    IndexRows,
    SparseCache,
    SparseLatentAttention,
    own_slots,
)
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.host_step import NO_STEP, HostStep
from dist_aclgraph.steps.padding import GraphLens
from dist_aclgraph.steps.prompt_share import share_prompts
from tests.engine.thread_ranks import ThreadRanks
from tests.laws import examples

HEADS, PLAIN, INDEX_HEADS, TOP_K = 4, 16, 2, 8
KINDS = ("heads", "prompts", "both")


def rope_of(positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.cpu().float().view(-1, 1, 1, 1) * torch.linspace(0.1, 1, 64)
    return angles.cos().to(positions.device), angles.sin().to(positions.device)


KIND: Any = SimpleNamespace(
    slot_dtype=torch.int64,
    takes_long_queries=True,
    ropes_written=True,
    reads_device_rows=True,
    chooses_keys=True,
    rope=rope_of,
)


@dataclass(frozen=True)
class Case:
    """Requests, each with a number of earlier tokens and a number of queries. The earlier tokens
    run in a step before the queries.

    Attributes:
        kind: what the ranks share. "heads": each rank has some of the heads and a shard of the
            cache. "prompts": each rank computes a part of each prompt. "both": each rank has a
            shard of the cache, and computes a part of each prompt.
    """

    shards: Shards
    num_ranks: int
    kind: str
    lens: Sequence[tuple[int, int]]

    def attend(self, npu: Npu, graph: BatchDescriptor | None = None) -> Tensor:
        """Return the results of all tokens, [n, heads, plain dim], joined from the results of all
        ranks.

        Args:
            graph: the step of the queries uses this graph's metadata; None for an eager step.
        """
        ranks = ThreadRanks.of(self.num_ranks, share_prompts=self.kind == "both")
        found: list[Any] = ranks.run(lambda rank, context: self._on_rank(npu, rank, context, graph))
        if self.kind == "heads":
            return torch.cat([out for out, _ in found], 1)
        total = torch.full((len(self._starts()[1]), HEADS, PLAIN), torch.nan)
        for out, ids in found:
            total[ids] = out
        return total

    def expected(self, npu: Npu) -> Tensor:
        whole = replace(self, shards=Shards(self.shards.block_size))
        with torch.inference_mode():
            return whole._run(npu, ContextPlace(whole.shards), UNDIVIDED, slice(None), None)[0]

    def _on_rank(
        self, npu: Npu, rank: int, context: ContextParallel, graph: BatchDescriptor | None
    ) -> Any:
        if self.kind == "heads":
            count = HEADS // self.num_ranks
            heads, place = slice(count * rank, count * (rank + 1)), ContextPlace(self.shards, rank)
        elif self.kind == "both":
            heads, place = slice(None), ContextPlace(self.shards, rank, self.num_ranks, rank)
        else:
            context = ContextParallel(pcp=context.dcp)
            heads, place = slice(None), ContextPlace(self.shards, 0, self.num_ranks, rank)
        return self._run(npu, place, context, heads, graph)

    def _run(
        self,
        npu: Npu,
        place: ContextPlace,
        context: ContextParallel,
        heads: slice,
        graph: BatchDescriptor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the results of the tokens that this rank runs, and the indices of these tokens."""
        made = torch.Generator().manual_seed(sum(map(sum, self.lens)))
        count = sum(map(sum, self.lens))

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=made)

        norm, keys, values = (
            x.contiguous().to(npu.device)
            for x in (random(512), *(random(HEADS, PLAIN, 512)[heads] for _ in range(2)))
        )
        attention = SparseLatentAttention(norm, keys, values, 0.05, TOP_K, context)
        q, q_rope = (random(count, HEADS, d)[:, heads] for d in (PLAIN, 64))
        kv, index_keys = random(count, 576), random(count, 128)
        queries, index_weights = random(count, INDEX_HEADS, 128), random(count, INDEX_HEADS).abs()
        # With this limit, short requests share a chunk, and a long request is alone in its chunk.
        steps = AttentionSteps(KIND, place, npu, max_tokens=48)
        num_blocks, shards = int(self._table().max()) + 1, place.shards
        cache = SparseCache(
            *(
                torch.zeros(num_blocks, size, 1, width).to(npu.device)
                for size, width in (
                    (shards.block_size, 512),
                    (shards.block_size, 64),
                    (shards.tokens_per_block, 128),
                )
            )
        )

        def run(host: HostStep, graph: BatchDescriptor | None) -> tuple[Tensor, Tensor]:
            share = share_prompts(host, place.num_prompt_ranks, place.prompt_rank)
            ids = torch.from_numpy(share.token_ids).long()
            size = len(ids) if share.prompts is None else share.prompts.split.num_tokens
            arrays = [
                torch.from_numpy(np.ascontiguousarray(x)).to(npu.device)
                for x in (share.positions, share.slots, share.block_table)
            ]
            if graph is None:
                metadata = steps.of_step(share, device_step(*arrays))
            else:
                size = graph.num_tokens
                arrays = [
                    torch.cat([x, x.new_full((size - len(ids), *x.shape[1:]), padding)])
                    for x, padding in zip(arrays, (0, -1, 0), strict=True)
                ]
                lens = GraphLens(place).pad(graph, host.query_ends, host.kv_lens)
                metadata = steps.of_graph(graph, device_step(*arrays), lens, None)

            def rows(x: Tensor) -> Tensor:
                own = x[ids]
                padding = own.new_ones(size - len(ids), *own.shape[1:])
                return torch.cat([own, padding]).contiguous().to(npu.device)

            out = torch.full((size, attention.num_heads, PLAIN), torch.nan).to(npu.device)
            index = IndexRows(rows(queries), rows(index_keys), rows(index_weights))
            positions = torch.zeros(size, dtype=torch.int32)
            positions[: len(ids)] = torch.from_numpy(share.positions)
            rope = rope_of(positions.to(npu.device))
            attention(rows(q), rows(q_rope), rows(kv), out, index, rope, cache, metadata, None)
            assert graph is None or out.isfinite().all()
            return out[: len(ids)].cpu(), ids

        earlier, later = self._steps(place)
        found = [run(earlier, None)] if len(earlier.rows) else []
        found.append(run(later, graph))
        outs, ids = zip(*found, strict=True)
        out, order = torch.cat(outs), torch.cat(ids)
        if context.pcp.size > 1:
            return out, order
        return out[order.argsort()], order.sort()[0]

    def _starts(self) -> tuple[list[int], range]:
        ends = [0, *accumulate(map(sum, self.lens))]
        return ends[:-1], range(ends[-1])

    def _table(self) -> Any:
        width = -(-max(map(sum, self.lens)) // self.shards.block_size)
        count = len(self.lens) * width
        order = np.random.RandomState(1).permutation(count) + 1
        return order.reshape(len(self.lens), width).astype(np.int32)

    def _steps(self, place: ContextPlace) -> tuple[HostStep, HostStep]:
        """Return the step of the earlier tokens, and the step of the queries."""
        starts, _ = self._starts()
        spans = [
            [(i, 0, before) for i, (before, _) in enumerate(self.lens) if before],
            [(i, before, before + n) for i, (before, n) in enumerate(self.lens)],
        ]
        # Requests with few queries come first in a batch.
        spans = [sorted(each, key=lambda span: span[2] - span[1]) for each in spans]
        return tuple(self._step(place, starts, each) for each in spans)  # type: ignore[return-value]

    def _step(
        self, place: ContextPlace, starts: list[int], spans: list[tuple[int, int, int]]
    ) -> HostStep:
        if not spans:
            return NO_STEP
        positions = np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in spans])
        table = np.stack([self._table()[i] for i, *_ in spans])
        rows = np.concatenate([np.full(b - a, row) for row, (_, a, b) in enumerate(spans)])
        first = np.array([starts[i] for i, *_ in spans], np.int32)
        return replace(
            NO_STEP,
            rows=np.arange(len(spans), dtype=np.int32),
            token_ids=positions + first[rows],
            positions=positions,
            slots=place.shards.slots_of(place.shard, table, rows, positions),
            query_ends=np.cumsum([b - a for _, a, b in spans], dtype=np.int32),
            kv_lens=np.array([b for *_, b in spans], np.int32),
            block_table=table,
        )


def device_step(positions: Tensor, slots: Tensor, block_table: Tensor) -> DeviceStep:
    return DeviceStep(positions, positions, slots, block_table, positions)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind, num_ranks = draw(st.sampled_from(KINDS)), draw(st.sampled_from([2, 4]))
    interleave = draw(st.sampled_from([1, 4, 16]))
    request = st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 3, 16, 17, 40]))
    lens = draw(st.lists(request, min_size=1, max_size=3))
    count = 1 if kind == "prompts" else num_ranks
    return Case(Shards(16, count, interleave), num_ranks, kind, lens)


@examples(150)
@given(cases())
def test_ranks_attend_as_one_rank_does(npu: Npu, case: Case) -> None:
    assert_equal(case.attend(npu), case.expected(npu))


def test_a_rank_without_tokens_writes_those_of_others(npu: Npu) -> None:
    # The 16 ranks divide 17 queries into 32 pieces, two for each rank, so several ranks have no
    # query.
    case = Case(Shards(16), 16, "prompts", [(0, 17)])
    assert_equal(case.attend(npu), case.expected(npu))


@pytest.mark.parametrize("kind", ["heads", "both"])
def test_padding_of_a_graph_changes_no_row(npu: Npu, kind: str) -> None:
    case = Case(Shards(16, 2, 4), 2, kind, [(0, 1), (3, 1), (50, 1)])
    assert_equal(case.attend(npu, BatchDescriptor(4, 4, 1, "FULL")), case.expected(npu))


@given(st.integers(1, 8), st.sampled_from([1, 2, 16]), st.integers(1, 200), st.data())
def test_shards_divide_a_choice(count: int, interleave: int, length: int, data: Any) -> None:
    shards = Shards(16, count, interleave)
    chosen = data.draw(st.lists(st.integers(0, length - 1), unique=True, max_size=TOP_K))
    table = torch.arange(1, 3 + length // shards.tokens_per_block, dtype=torch.int32)[None]
    row = torch.tensor([[chosen + [-1] * (TOP_K - len(chosen))]], dtype=torch.int32)
    whole = shards.whole_slots(table.numpy(), np.zeros(len(chosen), int), np.array(chosen, int))
    wanted = sorted(zip(shards.owners(whole).tolist(), shards.own_slots(whole), strict=True))

    found = []
    for shard in range(count):
        rows = ShardRows(ContextPlace(shards, shard), table, torch.ones(1, dtype=torch.int32))
        slots = own_slots(row, rows)[0, 0].tolist()
        number = slots.index(-1) if -1 in slots else TOP_K
        assert set(slots[number:]) <= {-1}
        found += [(shard, slot) for slot in slots[:number]]

    assert sorted(found) == wanted
