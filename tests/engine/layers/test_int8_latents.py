"""Latent attention to all keys of an int8 cache: the order of blocks, the values that are read, and
the number of operators.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_aclgraph.comm.groups import ONE_RANK
from dist_aclgraph.layers.int8_latents import KEY_BLOCK, read_int8_latents, seen_blocks
from dist_aclgraph.models.attention_kind import CacheRoom
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.decoder import Decoder
from dist_aclgraph.planning.budget.captured import ATTENTION, INT8_LATENTS, SEEN_BLOCKS
from dist_aclgraph.shapes.families import read_model_spec
from tests.checkpoints import make_reference
from tests.engine.layers.test_sparse_layers import NUM_TOKENS, count_operators, make_metadata


@pytest.mark.parametrize("num_seen", [0, 1, KEY_BLOCK, KEY_BLOCK + 1, 3 * KEY_BLOCK])
def test_the_blocks_of_all_keys_that_a_query_sees_come_first(npu: Any, num_seen: int) -> None:
    seen = torch.tensor([num_seen, 40], dtype=torch.int32).to(npu.device)

    blocks = seen_blocks(seen, 3 * KEY_BLOCK).cpu()

    assert blocks.dtype == torch.int32 and blocks.shape == (2, 1, 3)
    count = -(-num_seen // KEY_BLOCK)
    assert blocks[0, 0].tolist() == [*range(count), *[-1] * (3 - count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_read_as_they_were_written(npu: Any, dtype: torch.dtype) -> None:
    values = torch.randint(-127, 128, (5, 512), dtype=torch.int8)
    keys, scales = torch.randn(5, 64).to(dtype), torch.rand(5, 4)
    rows = torch.cat([part.view(torch.int8) for part in (values, keys, scales)], 1)

    latents, found = read_int8_latents(rows.to(npu.device), 512, dtype)

    exact = (values.float() * scales.repeat_interleave(128, 1)).to(dtype)
    assert torch.equal(latents.cpu(), exact) and torch.equal(found.cpu(), keys)


@torch.inference_mode()
def test_the_stream_budget_counts_every_operator(npu: Any, tmp_path: Path) -> None:
    make_reference("DeepseekV3ForCausalLM", tmp_path)
    decoder = Decoder(
        read_model_spec(tmp_path),
        ONE_RANK,
        Checkpoint(tmp_path, torch.float32),
        device=npu.device,
        max_len=128,
        int8_latents=True,
    )
    cache, *_ = decoder.make_caches(CacheRoom(8, 128, torch.float32, int8_latents=True))
    attention = decoder._stack.layers[0].attention
    rope = decoder.kind.rope(torch.arange(NUM_TOKENS, dtype=torch.int32).to(npu.device))
    inputs = attention.project(torch.randn(NUM_TOKENS, 128).to(npu.device), rope, None)
    metadata = make_metadata(npu)
    rows = metadata.on_device
    assert rows is not None
    metadata = replace(metadata, on_device=replace(rows, num_seen=torch.ones_like(rows.kv_lens)))
    earlier, counts = None, []
    for _ in range(2):
        attend = partial(attention.attend, inputs, rope, cache, metadata, earlier)
        counts.append(count_operators(npu, attend))
        earlier = attend()

    assert counts[1] <= ATTENTION + INT8_LATENTS
    assert counts[0] == counts[1] + SEEN_BLOCKS
