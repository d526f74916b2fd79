"""Runs a step of latent attention on random rows, and computes the expected result in plain
PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.attention_steps import AttentionSteps
from dist_aclgraph.layers.latent_attention import LatentAttention, LatentCache
from dist_aclgraph.models.mla import MultiHeadLatent
from tests.engine.prompt_steps import prompt_step

HEADS, BLOCK, BLOCKS_PER_REQUEST = 4, 16, 10
SCALE = 192**-0.5


def kv_slots_of(row: IntArray, length: int) -> Tensor:
    """Return the slots of the first ``length`` tokens of the request in ``row``."""
    positions = np.arange(length, dtype=np.int32)
    slots = Shards(BLOCK).slots(row[None], np.zeros(length, np.int32), positions)
    return torch.from_numpy(slots)


def make_attention(npu: Npu) -> LatentAttention:
    generator = torch.Generator().manual_seed(3)
    norm = torch.rand(512, generator=generator) + 0.5
    keys, values = torch.randn(2, HEADS, 128, 512, generator=generator) / 512**0.5
    return LatentAttention(*(part.to(npu.device) for part in (norm, keys, values)), SCALE)


class LatentRows:
    """Requests with random rows. Each request is given as (number of queries, number of earlier
    tokens).
    """

    def __init__(self, npu: Npu, lens: Sequence[tuple[int, int]]) -> None:
        generator = torch.Generator().manual_seed(len(lens))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.npu = npu
        self.query_ends = list(accumulate(query_len for query_len, _ in lens))
        self.kv_lens = [sum(each) for each in lens]
        n, num_blocks = self.query_ends[-1], BLOCKS_PER_REQUEST * len(lens) + 1
        self.q, self.q_rope, self.kv = normal(n, HEADS, 128), normal(n, HEADS, 64), normal(n, 576)
        angles = normal(n, 1, 1, 32).repeat(1, 1, 1, 2)
        self.rope = angles.cos(), angles.sin()
        self.cache = LatentCache(
            normal(num_blocks, BLOCK, 1, 512).to(npu.device),
            normal(num_blocks, BLOCK, 1, 64).to(npu.device),
        )
        order = np.random.RandomState(1).permutation(num_blocks - 1) + 1
        self.table = order.reshape(len(lens), -1).astype(np.int32)
        self.slots = torch.cat(
            [
                kv_slots_of(row, kv_len)[-query_len:]
                for row, kv_len, (query_len, _) in zip(self.table, self.kv_lens, lens, strict=True)
            ]
        ).long()

    def run(self, attention: LatentAttention, num_padding: int = 0, **limits: int) -> Tensor:
        """Run a step of attention; return its results, [n + num_padding, heads, 128]. Rows of
        padding must keep the value 7.

        Args:
            limits: arguments of ``AttentionSteps``.
        """
        device = self.npu.device

        def padded(rows: Tensor) -> Tensor:
            return torch.cat([rows, rows.new_full((num_padding, *rows.shape[1:]), 9.0)]).to(device)

        place = ContextPlace(Shards(BLOCK))
        steps = AttentionSteps(MultiHeadLatent, place, self.npu, **limits)
        metadata = steps.of_step(
            *prompt_step(self.npu, self.query_ends, self.kv_lens, self.table, self.slots)
        )
        out = torch.full((len(self.q) + num_padding, HEADS, 128), 7.0, device=device)
        inputs = [padded(rows) for rows in (self.q, self.q_rope, self.kv)]
        cos, sin = (padded(rows) for rows in self.rope)
        with torch.inference_mode():
            attention(*inputs, out, (cos, sin), self.cache, metadata)
        return out.cpu()

    def rows_of(self, cache: Tensor, slots: Tensor) -> Tensor:
        return cache.cpu().flatten(0, 2)[slots]

    def expected(self, attention: LatentAttention) -> Tensor:
        """Return the expected results: attention over the whole cache, with keys and values
        computed from the latents.
        """
        weights = attention.keys.cpu(), attention.values.cpu()
        outs, start = [], 0
        for row, end, length in zip(self.table, self.query_ends, self.kv_lens, strict=True):
            slots = kv_slots_of(row, length).long()
            latents = self.rows_of(self.cache.latents, slots)
            rope_keys = self.rows_of(self.cache.rope_keys, slots)
            k, v = (torch.einsum("kc,hdc->khd", latents, weight) for weight in weights)
            scores = torch.einsum("qhd,khd->hqk", self.q[start:end], k)
            scores += torch.einsum("qhd,kd->hqk", self.q_rope[start:end], rope_keys)
            hidden = torch.ones(end - start, length).triu(length - (end - start) + 1).bool()
            scores = (scores * SCALE).masked_fill(hidden, -torch.inf)
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
            start = end
        return torch.cat(outs)
