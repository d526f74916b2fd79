"""Single layers of sparse latent attention: their number of operators, and the contents of their
index cache.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_aclgraph.device.npu import Npu, runtime
from dist_aclgraph.engine.rank_caches import RankCaches
from dist_aclgraph.layers.attention import AttentionMetadata, DeviceRows, make_causal_mask
from dist_aclgraph.models.attention_kind import CacheRoom, LayerAttention, Rope
from dist_aclgraph.models.decoder import Decoder
from dist_aclgraph.planning.budget.captured import (
    ATTENTION,
    BEFORE_ATTENTION,
    INDEXER,
    INT8_LATENTS,
)
from tests.checkpoints import make_reference
from tests.engine.layers.test_mla import load_decoder

NUM_TOKENS, BLOCK_SIZE = 4, 16
GLM = "GlmMoeDsaForCausalLM"


def count_operators(npu: Npu, run: Callable[[], object]) -> int:
    """Return the number of operators that a graph of ``run`` contains."""
    with torch.inference_mode():
        run()
        npu.synchronize()
        graph = runtime().NPUGraph()
        with runtime().graph(graph):
            run()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        graph.debug_dump(file.name)
        nodes = json.loads(Path(file.name).read_text())
    return sum(node["name"].startswith("aclnn") for node in nodes)


def make_metadata(npu: Npu) -> AttentionMetadata:
    """Return the metadata of a step whose requests have one query and one key each."""
    each = torch.arange(1, NUM_TOKENS + 1, dtype=torch.int32).to(npu.device)
    slots = each * BLOCK_SIZE
    return AttentionMetadata(
        num_tokens=NUM_TOKENS,
        written=slots.long(),
        block_table=each.view(-1, 1),
        query_ends=list(range(1, NUM_TOKENS + 1)),
        kv_lens=[1] * NUM_TOKENS,
        causal_mask=make_causal_mask(npu.device),
        is_causal=False,
        on_device=DeviceRows(each, torch.ones_like(each), slots.unsqueeze(1)),
    )


@dataclass(frozen=True)
class Layers:
    """A layer with an indexer, a layer that uses the first layer's choice of keys, and the inputs
    of a step.
    """

    decoder: Decoder
    metadata: AttentionMetadata
    rope: Rope
    h: torch.Tensor

    def make_caches(self, *, int8: bool = False) -> list[Any]:
        room = CacheRoom(8, BLOCK_SIZE, torch.float32, int8_latents=int8)
        return self.decoder.make_caches(room)

    def attention(self, index: int) -> LayerAttention:
        return self.decoder._stack.layers[index].attention


@pytest.fixture(scope="module")
def layers(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Layers:
    directory = tmp_path_factory.mktemp("glm")
    make_reference(GLM, directory, num_hidden_layers=2, indexer_types=["full", "shared"])
    decoder = load_decoder(npu, directory)
    positions = torch.arange(NUM_TOKENS, dtype=torch.int32).to(npu.device)
    h = torch.randn(NUM_TOKENS, 128).to(npu.device)
    return Layers(decoder, make_metadata(npu), decoder.kind.rope(positions), h)


@pytest.mark.parametrize("int8", [False, True])
@torch.inference_mode()
def test_the_stream_budget_counts_every_operator_of_a_layer(
    npu: Any, layers: Layers, int8: bool
) -> None:
    earlier, counts = None, []
    for index, cache in enumerate(layers.make_caches(int8=int8)):
        attention = layers.attention(index)
        inputs = attention.project(layers.h, layers.rope, None)
        attend = partial(attention.attend, inputs, layers.rope, cache, layers.metadata, earlier)
        projected = count_operators(npu, partial(attention.project, layers.h, layers.rope, None))
        counts.append((1 + projected, count_operators(npu, attend)))  # 1: the layer's norm
        earlier = attend()

    (before, attended), (before_chosen, attended_chosen) = counts
    assert before == BEFORE_ATTENTION + INDEXER > before_chosen
    assert ATTENTION + INT8_LATENTS * int8 >= attended > attended_chosen


@torch.inference_mode()
def test_index_keys_are_normalised_and_rotated_in_their_slots(layers: Layers) -> None:
    cache, other = layers.make_caches()
    inputs = layers.attention(0).project(layers.h, layers.rope, None)

    layers.attention(0).attend(inputs, layers.rope, cache, layers.metadata, None)

    assert cache.index_keys is not None and other.index_keys is None
    flat = cache.index_keys.flatten(0, 2).cpu()
    slots = layers.metadata.written.cpu()
    torch.testing.assert_close(flat[slots], inputs[-3].cpu())
    assert sorted(flat.any(-1).nonzero().flatten().tolist()) == sorted(slots.tolist())


@torch.inference_mode()
def test_padding_writes_index_keys_into_the_dummy_block_only(layers: Layers) -> None:
    cache, _ = layers.make_caches()
    inputs = layers.attention(0).project(layers.h, layers.rope, None)
    rows = layers.metadata.on_device
    assert rows is not None
    slots = rows.slots.clone()
    slots[-1] = 0  # AttentionSteps replaces the slot -1 by 0
    metadata = replace(layers.metadata, on_device=replace(rows, slots=slots))

    layers.attention(0).attend(inputs, layers.rope, cache, metadata, None)

    written = cache.index_keys.any(-1).flatten(1).any(-1).cpu()
    assert written.tolist() == [True, True, True, True, False, False, False, False]


@pytest.mark.parametrize("int8", [False, True])
@torch.inference_mode()
def test_blocks_are_cleaned(npu: Any, layers: Layers, int8: bool) -> None:
    caches = RankCaches(npu, layers.decoder, None, BLOCK_SIZE, torch.float32, 0, int8)
    caches.make(4)
    for tensor in caches.block_tensors():
        tensor.fill_(3)

    caches.clean(np.array([1, 3], np.int32))

    for tensor in caches.block_tensors():
        assert tensor.cpu().flatten(1).any(1).tolist() == [True, False, True, False]


@torch.inference_mode()
def test_attention_to_int8_latents_is_attention_to_their_values(npu: Any, layers: Layers) -> None:
    """A latent and its int8 value differ by at most half a scale. A scale is 1/127 of the largest
    latent in its tile.
    """
    floats, packed = (layers.make_caches(int8=int8)[0] for int8 in (False, True))
    attention = layers.attention(0)
    found = []
    for cache in (floats, packed):
        inputs = attention.project(layers.h, layers.rope, None)
        attention.attend(inputs, layers.rope, cache, layers.metadata, None)
        found.append(inputs[-1].cpu())

    slots = layers.metadata.written.cpu()
    rows = packed.rows.flatten(0, 2).cpu()[slots]
    scales = rows[:, 512 + 256 :].contiguous().view(torch.float32).repeat_interleave(128, 1)
    exact = floats.latents.flatten(0, 2).cpu()[slots]
    assert ((rows[:, :512] * scales - exact).abs() <= scales * 0.5001).all()
    keys = rows[:, 512 : 512 + 256].contiguous().view(torch.float32)
    assert torch.equal(keys, floats.rope_keys.flatten(0, 2).cpu()[slots])
    # Each query sees only its own key, so the expected result is computed from the latent of this
    # key.
    values = attention.sparse.values.cpu()
    wanted = torch.einsum("nc,hdc->nhd", rows[:, :512] * scales, values)
    torch.testing.assert_close(found[1], wanted, atol=1e-4, rtol=1e-4)
    assert not torch.equal(*found)
