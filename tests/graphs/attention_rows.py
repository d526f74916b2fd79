"""A decoder that consists only of attention, and the expected results in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.device.npu import GraphPool, Npu, runtime
from dist_aclgraph.graphs.captured_graph import CapturedGraph, capture
from dist_aclgraph.graphs.recording import Recording
from dist_aclgraph.graphs.step_buffers import StepBuffers
from dist_aclgraph.graphs.task_update import TaskRecorder
from dist_aclgraph.layers.attention import (
    AttentionMetadata,
    KVCache,
    PagedAttention,
    make_causal_mask,
)
from dist_aclgraph.planning.buckets import BufferSizes
from dist_aclgraph.steps.host_step import NO_STEP
from dist_aclgraph.steps.padding import PADDING_KV_LEN, Lens
from tests.plans import decode_graph

HEADS, KV_HEADS, DIM = 4, 2, 64
BLOCK, NUM_BLOCKS, MAX_BLOCKS = 32, 64, 4
VOCAB = 61


@dataclass
class Row:
    """One request: its tokens so far, and its blocks."""

    tokens: list[int]
    blocks: list[int]


def make_buffers(npu: Npu, max_tokens: int = 8, *, steps_in_flight: int = 1) -> StepBuffers:
    return StepBuffers(
        npu,
        BufferSizes(max_tokens, max_tokens, max_tokens),
        MAX_BLOCKS,
        HEADS * DIM,
        torch.float32,
        steps_in_flight=steps_in_flight,
    )


class AttentionDecoder:
    """Captures and replays graphs of attention. A table contains the query, the key and the value
    of each token, in the row with the token's id.

    All layers compute the same values, and the output is the mean over the layers. So wrong lengths
    in one layer change the output.
    """

    def __init__(self, npu: Npu, max_tokens: int = 8, layers: int = 1) -> None:
        self.npu = npu
        self.layers = layers
        self.buffers = make_buffers(npu, max_tokens)
        generator = torch.Generator().manual_seed(1)
        self._table_cpu = torch.randn(VOCAB, (HEADS + 2 * KV_HEADS) * DIM, generator=generator)
        self._table = self._table_cpu.to(npu.device)
        shape = (NUM_BLOCKS, BLOCK, KV_HEADS, DIM)
        self.cache = KVCache(
            torch.zeros(shape, device=npu.device), torch.zeros(shape, device=npu.device)
        )
        self._mask = make_causal_mask(npu.device)
        self._attention = PagedAttention(HEADS, KV_HEADS, DIM)
        self.main = runtime().current_stream()
        self.side = runtime().Stream()
        self.pool = GraphPool()
        self.recording = Recording(npu, self.pool)

    def forward(
        self, bucket: int, tasks: TaskRecorder | None, kv_lens: list[int] | None = None
    ) -> None:
        inputs = self.buffers.inputs(decode_graph(bucket))
        metadata = AttentionMetadata(
            num_tokens=bucket,
            written=inputs.slots,
            block_table=inputs.block_table,
            query_ends=list(range(1, bucket + 1)),
            kv_lens=kv_lens or [PADDING_KV_LEN] * bucket,
            causal_mask=self._mask,
            is_causal=False,
            tasks=tasks,
        )
        with torch.inference_mode():
            q, k, v = self._split(self._table.index_select(0, inputs.token_ids))
            total = torch.zeros_like(self.buffers.logits[:bucket])
            for _ in range(self.layers):
                out = torch.empty_like(q)
                self._attention(q, k, v, out, self.cache, metadata)
                total += out.flatten(1)
            self.buffers.logits[:bucket].copy_(total / self.layers)

    @staticmethod
    def _split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
        n = qkv.shape[0]
        return (
            q.reshape(n, HEADS, DIM).contiguous(),
            k.reshape(n, KV_HEADS, DIM).contiguous(),
            v.reshape(n, KV_HEADS, DIM).contiguous(),
        )

    def capture(
        self, bucket: int, forward: Callable[[TaskRecorder], None] | None = None
    ) -> CapturedGraph:
        self.write(bucket, [])
        self.forward(bucket, None)
        self.npu.synchronize()
        return capture(
            decode_graph(bucket),
            forward or (lambda tasks: self.forward(bucket, tasks)),
            recording=self.recording,
            addresses=self.buffers.addresses,
        )

    def write(self, bucket: int, rows: list[Row]) -> None:
        """Write the last token of every row to the buffers of the bucket's graph."""
        positions = np.array([len(row.tokens) - 1 for row in rows], np.int32)
        table = np.zeros((len(rows), MAX_BLOCKS), np.int32)
        for i, row in enumerate(rows):
            table[i, : len(row.blocks)] = row.blocks
        step = replace(
            NO_STEP,
            rows=np.arange(len(rows), dtype=np.int32),
            token_ids=np.array([row.tokens[-1] for row in rows], np.int32),
            positions=positions,
            slots=np.array([slot(row) for row in rows], np.int32),
            places=np.arange(len(rows), dtype=np.int32),
            block_table=table,
        )
        self.buffers.write(decode_graph(bucket), step)

    def replay(
        self, graph: CapturedGraph, rows: list[Row], kv_lens: list[int] | None = None, **other: Any
    ) -> Tensor:
        """Replay the graph with the KV lengths ``kv_lens`` (default: the rows' true lengths);
        return the output of each row, [num_rows, ...].
        """
        self.queue(graph, rows, kv_lens, **other)
        return self.buffers.logits[: len(rows)].cpu()

    def queue(
        self, graph: CapturedGraph, rows: list[Row], kv_lens: list[int] | None = None, **other: Any
    ) -> int:
        """Queue a replay and its updates of lengths; return the number of updates that were not
        sent ahead.
        """
        self.write(graph.descriptor.num_tokens, rows)
        ends, true_lens = self.lens(graph, rows)
        lens = Lens(other.get("ends", ends), (kv_lens or true_lens[0],))
        addresses = other.get("addresses", self.buffers.addresses)
        graph.replay(self.main, self.side, addresses, lens)
        return graph.updates.after_replay(self.main, self.side, lens)

    @staticmethod
    def lens(graph: CapturedGraph, rows: list[Row], longer: int = 0) -> Lens:
        """Return the padded lengths for a replay, with ``longer`` tokens added to each row."""
        bucket = graph.descriptor.num_tokens
        live = [len(row.tokens) + longer for row in rows]
        padding = [PADDING_KV_LEN] * (bucket - len(rows))
        return Lens(list(range(1, bucket + 1)), (live + padding,))

    def expected(self, rows: list[Row]) -> Tensor:
        """Compute, in plain PyTorch, the attention of each row's last token to all tokens of the
        row.
        """
        out = []
        for row in rows:
            q, k, v = self._split(self._table_cpu[row.tokens])
            k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
            weights = torch.einsum("hd,nhd->hn", q[-1], k).mul(DIM**-0.5).softmax(-1)
            out.append(torch.einsum("hn,nhd->hd", weights, v).flatten())
        return torch.stack(out)


def slot(row: Row) -> int:
    position = len(row.tokens) - 1
    return row.blocks[position // BLOCK] * BLOCK + position % BLOCK


def make_rows(count: int, seed: int = 0) -> list[Row]:
    """Return rows with one token each. Each row has its own blocks; block 0 belongs to no row."""
    random = np.random.RandomState(seed)
    ids = random.permutation(np.arange(1, NUM_BLOCKS))
    return [
        Row([int(random.randint(VOCAB))], ids[i * MAX_BLOCKS : (i + 1) * MAX_BLOCKS].tolist())
        for i in range(count)
    ]


def grow(rows: list[Row], seed: int) -> None:
    random = np.random.RandomState(seed)
    for row in rows:
        row.tokens.append(int(random.randint(VOCAB)))
