"""The two forms of latent attention are compared with each other. The weights and the scale of
latent attention are compared with transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_aclgraph.comm.groups import ALONE, ONE_RANK, CommGroup
from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.attention_steps import AttentionSteps
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.layers.experts import ExpertSetup
from dist_aclgraph.layers.latent_attention import LatentAttention
from dist_aclgraph.models.attention_kind import CacheRoom
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.decoder import Decoder
from dist_aclgraph.models.layer_stack import LayerStack, load_layer, load_norm
from dist_aclgraph.models.loading import WeightSlices
from dist_aclgraph.models.mla import MultiHeadLatentAttention, share_latent_heads
from dist_aclgraph.shapes.families import read_model_spec
from tests.checkpoints import DEEPSEEK_ROPE, greedy, make_prompts, make_reference
from tests.engine.latent_rows import LatentRows, make_attention
from tests.engine.prompt_steps import prompt_step
from tests.engine.runners import Sequences, make_runner

DEEPSEEK = ["DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"]
FEW = [(1, 40), (3, 0), (16, 100), (1, 0)]  # queries and earlier tokens of each request
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # for float32; the forms add in different orders


@pytest.fixture(scope="module")
def attention(npu: Any) -> LatentAttention:
    return make_attention(npu)


def load_slices(npu: Npu, directory: Path) -> WeightSlices:
    checkpoint = Checkpoint(directory, torch.float32)
    return WeightSlices(checkpoint, ALONE, npu.device, ExpertSetup(ONE_RANK))


def load_decoder(npu: Npu, directory: Path) -> Decoder:
    checkpoint = Checkpoint(directory, torch.float32)
    spec = read_model_spec(directory)
    return Decoder(spec, ONE_RANK, checkpoint, device=npu.device, max_len=128)


@pytest.mark.parametrize(
    "limits",
    [{}, {"max_queries": 0}, {"max_queries": 0, "max_tokens": 32}],
    ids=["absorbed", "plain", "chunked"],
)
def test_every_form_is_attention_over_keys_and_values_of_the_latents(
    npu: Any, attention: LatentAttention, limits: dict[str, int]
) -> None:
    rows = LatentRows(npu, FEW)

    out = rows.run(attention, **limits)

    torch.testing.assert_close(out, rows.expected(attention), **TOLERANCE)


def test_absorbed_equals_plain(npu: Any, attention: LatentAttention) -> None:
    rows = LatentRows(npu, FEW)

    absorbed = rows.run(attention)
    plain = rows.run(attention, max_queries=0)

    assert not torch.equal(absorbed, plain)
    torch.testing.assert_close(absorbed, plain, **TOLERANCE)


@pytest.mark.parametrize(
    "lens",
    [
        [(1, 12), (4, 60), (30, 0), (20, 80), (1, 70)],
        [(17, 0), (1, 30), (16, 3)],
        [(1, 100), (60, 90)],
    ],
)
@pytest.mark.parametrize("max_tokens", [1000, 40])
def test_forms_share_a_step_in_any_order(
    npu: Any, attention: LatentAttention, lens: list[tuple[int, int]], max_tokens: int
) -> None:
    rows = LatentRows(npu, lens)

    out = rows.run(attention, num_padding=5, max_tokens=max_tokens)

    torch.testing.assert_close(out[:-5], rows.expected(attention), **TOLERANCE)
    assert (out[-5:] == 7.0).all()


def test_the_cache_gets_normed_latents_and_rotated_keys(
    npu: Any, attention: LatentAttention
) -> None:
    rows = LatentRows(npu, [(1, 20), (5, 3)])
    before = rows.cache.latents.cpu().clone()

    rows.run(attention, num_padding=2)

    latent, rope = rows.kv.split([512, 64], -1)
    variance = latent.pow(2).mean(-1, keepdim=True)
    normed = latent * torch.rsqrt(variance + 1e-6) * attention.norm.cpu()
    cos, sin = (table[:, 0, 0, :32] for table in rows.rope)
    even, odd = rope[:, ::2], rope[:, 1::2]
    rotated = torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)
    cache = rows.cache
    torch.testing.assert_close(rows.rows_of(cache.latents, rows.slots), normed, **TOLERANCE)
    torch.testing.assert_close(rows.rows_of(cache.rope_keys, rows.slots), rotated, **TOLERANCE)
    changed = (cache.latents.cpu() != before).any(-1).flatten().nonzero().flatten()
    assert sorted(changed.tolist()) == sorted(rows.slots.tolist())


@pytest.mark.parametrize("architecture", DEEPSEEK)
@pytest.mark.parametrize(
    "rope",
    [DEEPSEEK_ROPE, {**DEEPSEEK_ROPE, "mscale": 0.5, "mscale_all_dim": 1.0},
     {"rope_type": "default", "rope_theta": 10000.0}],
)  # fmt: skip
def test_the_scale_of_scores_equals_that_of_transformers(
    npu: Any, tmp_path: Path, architecture: str, rope: dict[str, Any]
) -> None:
    model = make_reference(architecture, tmp_path, rope_parameters=rope, num_hidden_layers=1)
    kind = load_decoder(npu, tmp_path).kind

    attention = kind.load(load_slices(npu, tmp_path), 0)

    assert isinstance(attention, MultiHeadLatentAttention)
    assert attention.latent.scale == pytest.approx(model.model.layers[0].self_attn.scaling)


def test_rotary_tables_have_room_for_drafts_past_the_context(npu: Any, tmp_path: Path) -> None:
    model = make_reference("DeepseekV3ForCausalLM", tmp_path, num_hidden_layers=1)
    positions = torch.arange(120, 144)  # the context has 128 positions

    cos, sin = load_decoder(npu, tmp_path).kind.rope(positions.int().to(npu.device))

    expected = model.model.rotary_emb(torch.zeros(1), positions[None])
    for table, values in zip((cos, sin), expected, strict=True):
        torch.testing.assert_close(table[:, 0, 0].cpu(), values[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("q_lora_rank", [None, 96])
@pytest.mark.parametrize("interleave", [True, False])
def test_queries_with_and_without_lora_and_either_order_of_rotation(
    npu: Any, tmp_path: Path, q_lora_rank: int | None, interleave: bool
) -> None:
    changes = {"q_lora_rank": q_lora_rank, "rope_interleave": interleave}
    model = make_reference("DeepseekV3ForCausalLM", tmp_path, **changes)
    prompts = make_prompts([20, 3])
    sequences = Sequences(make_runner(npu, tmp_path), prompts)

    sequences.prefill()
    for _ in range(8):
        sequences.decode(None)

    assert sequences.new == greedy(model, prompts, 9)


def test_a_layer_runs_alone_from_hidden_states(npu: Any, tmp_path: Path) -> None:
    model = make_reference("DeepseekV3ForCausalLM", tmp_path)
    n, last = 30, model.config.num_hidden_layers - 1
    hidden = torch.randn(n, model.config.hidden_size)
    spec, kind = read_model_spec(tmp_path), load_decoder(npu, tmp_path).kind
    slices = load_slices(npu, tmp_path)
    norm = load_norm(slices, spec, "model.norm.weight")
    stack = LayerStack(kind.rope, [load_layer(slices, spec, kind, last)], norm)
    positions = torch.arange(n, dtype=torch.int32, device=npu.device)
    table, slots = np.array([[1, 2]], np.int32), torch.arange(n, dtype=torch.int32) + 32
    metadata = AttentionSteps(kind, ContextPlace(Shards(32)), npu).of_step(
        *prompt_step(npu, [n], [n], table, slots)
    )

    with torch.inference_mode():
        out = stack.forward(
            lambda x: x,
            (hidden.to(npu.device),),
            positions,
            slots.to(npu.device),
            [kind.make_cache(CacheRoom(3, 32, torch.float32))],
            metadata,
        )

    with torch.no_grad():
        expected = model.model.layers[last](
            hidden[None],
            attention_mask=torch.full((n, n), -torch.inf).triu(1)[None, None],
            position_embeddings=model.model.rotary_emb(hidden, torch.arange(n)[None]),
        )
        expected = model.model.norm(expected)[0]
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("heads", "size"), [(128, 1), (128, 8), (16, 16), (64, 2)])
def test_heads_are_split_in_order(heads: int, size: int) -> None:
    shares = [share_latent_heads(heads, CommGroup(tuple(range(size)), r)) for r in range(size)]

    assert [head for share in shares for head in share] == list(range(heads))


@pytest.mark.parametrize(("heads", "size"), [(16, 3), (256, 1), (16, 32)])
def test_heads_that_the_operator_does_not_take_are_refused(heads: int, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"parallel\.tp is {size}.* {heads} attention heads"):
        share_latent_heads(heads, CommGroup(tuple(range(size)), 0))


@pytest.mark.parametrize(("heads", "size"), [(12, 1), (24, 2)])
def test_sparse_attention_adds_no_heads_of_zeros(heads: int, size: int) -> None:
    group = CommGroup(tuple(range(size)), 0)

    assert len(share_latent_heads(heads, group)) == 12
    with pytest.raises(ConfigError, match="powers of two up to 128"):
        share_latent_heads(heads, group, pads_heads=False)
