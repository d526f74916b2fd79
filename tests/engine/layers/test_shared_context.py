"""Attention of several ranks, each with a shard of the cache, is compared with attention over the
whole cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
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
from dist_aclgraph.layers.attention import KVCache, PagedAttention
from dist_aclgraph.layers.context_parallel import ContextParallel
from dist_aclgraph.models.gqa import GroupedQuery
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.padding import GraphLens
from tests.engine.prompt_steps import prompt_step
from tests.engine.thread_ranks import ThreadRanks
from tests.laws import examples

HEADS, DIM = 4, 64  # number of query heads of all ranks together; there is one KV head
GARBAGE = 1000.0


@dataclass(frozen=True)
class Case:
    """Requests on ``shards.count`` ranks. Each request is given as (number of queries, number of
    earlier tokens).

    Unwritten slots of the cache contain very large values, which change the result if a query
    attends to them by mistake. The slots do not contain NaN, because NaN changes the result even if
    its weight is zero.
    """

    shards: Shards
    lens: Sequence[tuple[int, int]]
    share_prompts: bool = False

    @property
    def ranks(self) -> ThreadRanks:
        return ThreadRanks.of(self.shards.count, share_prompts=self.share_prompts)

    def attend(self, npu: Npu, ranks: ThreadRanks, graph: BatchDescriptor | None = None) -> Tensor:
        """Return the result of all ranks, [n, heads, dim], with the padding of a graph. If ranks
        split prompts, check that all have the same result.

        Args:
            graph: the graph to whose lengths the step is padded; None for an eager step.
        """
        found = ranks.run(lambda rank, context: self._attend_on(npu, rank, context, graph))
        if not self.share_prompts:
            return torch.cat(found, 1)
        assert all(torch.equal(found[0], each) for each in found)
        return found[0]

    def _attend_on(
        self, npu: Npu, shard: int, context: ContextParallel, graph: BatchDescriptor | None
    ) -> Tensor:
        shards, device = self.shards, npu.device
        q, keys, values = self._rows()
        heads = HEADS if self.share_prompts else HEADS // shards.count
        own_heads = slice(None) if self.share_prompts else slice(heads * shard, heads * (shard + 1))
        table = self._table()
        shape = (int(table.max()) + 1, shards.block_size, 1, DIM)
        cache = KVCache(*(torch.full(shape, GARBAGE) for _ in range(2)))
        for each, rows in ((cache.keys, keys), (cache.values, values)):
            each[0] = 0  # the dummy block contains zeros
            flat = each.view(-1, 1, DIM)
            for index, (_, before) in enumerate(self.lens):
                slots, kept = self._slots(shard, index, np.arange(before, dtype=np.int32))
                flat[slots[kept]] = rows[index][:before][kept]
        cache = KVCache(cache.keys.to(device), cache.values.to(device))
        place = ContextPlace(shards, shard)
        steps = AttentionSteps(GroupedQuery, place, npu)
        new = [
            self._slots(shard, index, np.arange(before, before + queries, dtype=np.int32))
            for index, (queries, before) in enumerate(self.lens)
        ]
        slots = torch.cat([torch.where(kept, slots, -2) for slots, kept in new])
        ends = list(accumulate(queries for queries, _ in self.lens))
        host, step = prompt_step(npu, ends, [sum(each) for each in self.lens], table, slots)
        k, v = (
            torch.cat([row[before:] for row, (_, before) in zip(rows, self.lens, strict=True)])
            for rows in (keys, values)
        )
        if graph is None:
            metadata, padding = steps.of_step(host, step), 0
        else:
            padding = graph.num_tokens - ends[-1]
            lens = GraphLens(place).pad(graph, host.query_ends, host.kv_lens)
            metadata = steps.of_graph(graph, _padded(step, padding), lens, None)
        q, k, v = (
            torch.cat([x, x.new_ones(padding, *x.shape[1:])]).to(device).contiguous()
            for x in (q[:, own_heads], k, v)
        )
        out = torch.full_like(q, torch.nan)
        PagedAttention(heads, 1, DIM, context)(q, k, v, out, cache, metadata)
        return out.cpu()

    def expected(self) -> Tensor:
        """Return each query's causal attention to the tokens of its request, in plain PyTorch."""
        q, keys, values = self._rows()
        outs, start = [], 0
        for index, (queries, before) in enumerate(self.lens):
            for query in range(queries):
                seen = before + query + 1
                k, v = keys[index][:seen, 0], values[index][:seen, 0]
                weights = (q[start + query] @ k.T * DIM**-0.5).softmax(-1)
                outs.append(weights @ v)
            start += queries
        return torch.stack(outs)

    def _rows(self) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        generator = torch.Generator().manual_seed(sum(map(sum, self.lens)))
        q = torch.randn(sum(n for n, _ in self.lens), HEADS, DIM, generator=generator)
        keys, values = (
            [torch.randn(sum(each), 1, DIM, generator=generator) for each in self.lens]
            for _ in range(2)
        )
        return q, keys, values

    def _table(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        width = -(-max(map(sum, self.lens)) // self.shards.tokens_per_block)
        count = len(self.lens) * width
        order = np.random.RandomState(1).permutation(count) + 1
        return order.reshape(len(self.lens), width).astype(np.int32)

    def _slots(self, shard: int, index: int, positions: Any) -> tuple[Tensor, Tensor]:
        """Return the slot of each position of a request, and whether ``shard`` stores it."""
        slots = self.shards.slots(self._table(), np.full(len(positions), index), positions)
        return torch.from_numpy(slots).long(), torch.from_numpy(
            self.shards.owners(positions) == shard
        )


def _padded(step: DeviceStep, count: int) -> DeviceStep:
    """Return the step with ``count`` tokens and requests of padding, as in a graph. Each has the
    dummy block, position 0, and slot -1.
    """

    def grown(x: Tensor, value: int) -> Tensor:
        return torch.cat([x, x.new_full((count, *x.shape[1:]), value)])

    return DeviceStep(
        step.token_ids,
        grown(step.positions, 0),
        grown(step.slots, -1),
        grown(step.block_table, 0),
        step.places,
    )


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


BOTH_KINDS = pytest.mark.parametrize("share_prompts", [False, True], ids=["heads", "prompts"])


@BOTH_KINDS
@pytest.mark.parametrize("before", [126, 127, 128, 129, 255, 256])
def test_no_query_sees_the_future_when_its_request_crosses_into_a_shard(
    npu: Npu, before: int, share_prompts: bool
) -> None:
    """After 127 earlier tokens, the first query's key is in shard 0, and the drafts' keys are in
    shard 1.
    """
    case = Case(Shards(128, 2, 128), [(3, before)], share_prompts)
    assert_close(case.attend(npu, case.ranks), case.expected())


@BOTH_KINDS
@pytest.mark.parametrize("count", [2, 4])
def test_a_shard_without_keys_adds_nothing(npu: Npu, count: int, share_prompts: bool) -> None:
    case = Case(Shards(16, count, 16), [(1, 0), (3, 0), (1, 14), (2, 15), (1, 40)], share_prompts)
    assert_close(case.attend(npu, case.ranks), case.expected())


@BOTH_KINDS
def test_padded_rows_are_no_nan_and_change_no_other(npu: Npu, share_prompts: bool) -> None:
    case = Case(Shards(16, 4, 4), [(1, 0), (1, 3), (1, 4), (1, 50)], share_prompts)
    found = case.attend(npu, case.ranks, BatchDescriptor(8, 8, 1, "FULL"))
    assert_close(found[:4], case.expected())
    assert found[4:].isfinite().all()


def test_a_row_that_all_shards_find_empty_is_zero(npu: Npu) -> None:
    def merge(_: int, context: ContextParallel) -> Tensor:
        out = torch.full((3, HEADS, DIM), torch.nan, device=npu.device)
        sums = torch.full((3, HEADS, 1), torch.nan, device=npu.device)
        is_empty = torch.ones(3, 1, 1, dtype=torch.bool, device=npu.device)
        return context.merge(out, sums, is_empty).cpu()

    for found in ThreadRanks.of(2, share_prompts=True).run(merge):
        assert found.count_nonzero() == 0


@BOTH_KINDS
def test_ranks_meet_as_often_whatever_their_shards_keep(npu: Npu, share_prompts: bool) -> None:
    visits = []
    for lens in ([(1, 0)], [(1, 15), (1, 16)], [(1, 70), (3, 31)]):
        case = Case(Shards(16, 4, 16), lens, share_prompts)
        ranks = case.ranks
        case.attend(npu, ranks)
        visits.append(ranks.meeting.visits)
    assert all(each == [visits[0][0]] * 4 for each in visits)


@pytest.mark.parametrize("heads", [1, 2])
def test_gathered_heads_lie_one_after_the_other(npu: Npu, heads: int) -> None:
    def gather(rank: int, context: ContextParallel) -> Tensor:
        return context.gather_heads(torch.full((3, heads, 8), float(rank), device=npu.device))

    for found in ThreadRanks.of(2, share_prompts=False).run(gather):
        assert found.is_contiguous()
        assert found[..., 0].cpu().tolist() == [[0.0] * heads + [1.0] * heads] * 3


@st.composite
def cases(draw: st.DrawFn) -> Case:
    interleave = draw(st.sampled_from([1, 2, 16]))
    block_size = draw(st.sampled_from([16, 32]))
    request = st.tuples(st.sampled_from([1, 1, 2, 4, 16, 17, 40]), st.integers(0, 150))
    lens = sorted(draw(st.lists(request, min_size=1, max_size=4)))
    return Case(Shards(block_size, draw(st.sampled_from([2, 4])), interleave), lens)


@examples(60)
@given(cases())
def test_whatever_the_turns_and_the_lengths_shares_add_up(npu: Npu, case: Case) -> None:
    assert_close(case.attend(npu, case.ranks), case.expected())
