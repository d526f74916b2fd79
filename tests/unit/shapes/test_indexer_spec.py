"""The facts about the indexer of sparse attention are read from config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import make_config
from dist_aclgraph.errors import ConfigError, ModelError, UnsupportedModelError
from dist_aclgraph.kv.cache_spec import KVCacheSpec, PagedTensor
from dist_aclgraph.shapes.families import read_model_spec
from dist_aclgraph.shapes.indexer_spec import IndexerSpec
from dist_aclgraph.shapes.model_facts import check_model
from dist_aclgraph.shapes.model_spec import ModelSpec
from dist_aclgraph.shapes.weight_sizes import weight_parts
from tests.unit.shapes.test_model_spec import V3

V32 = {
    **V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
GLM: dict[str, Any] = {
    **V32,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "index_n_heads": 32,
    "num_hidden_layers": 6,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
}


def read(directory: Path, config: dict[str, Any], **changes: Any) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(config | changes))
    return read_model_spec(directory)


def layers_of(directory: Path, **changes: Any) -> list[int]:
    indexer = read(directory, GLM, **changes).indexer
    assert indexer is not None
    return sorted(indexer.layers)


def test_deepseek_v32_as_published(tmp_path: Path) -> None:
    spec = read(tmp_path, V32)

    assert spec.indexer == IndexerSpec(
        num_heads=64, head_dim=128, top_k=2048, interleaves=False, layers=frozenset(range(62))
    )
    assert spec.experts is not None and spec.experts.layers == frozenset(range(3, 62))


def test_glm_5_has_its_own_sizes_and_its_indexer_rotates_neighbours(tmp_path: Path) -> None:
    spec = read(tmp_path, GLM)

    assert spec.latent is not None and spec.indexer is not None
    assert (spec.latent.plain_dim, spec.latent.value_dim, spec.latent.q_rank) == (192, 256, 2048)
    assert spec.indexer.interleaves


@pytest.mark.parametrize("architecture", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_a_checkpoint_may_say_how_its_indexer_rotates(tmp_path: Path, architecture: str) -> None:
    for interleaves in (False, True):
        changes = {"architectures": [architecture], "indexer_rope_interleave": interleaves}
        indexer = read(tmp_path, GLM, **changes).indexer
        assert indexer is not None and indexer.interleaves is interleaves


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"indexer_types": ["full", "shared", "shared", "full", "shared", "full"]}, [0, 3, 5, 6]),
        ({"index_topk_pattern": "FSSFFS"}, [0, 3, 4, 6]),
        # The first two layers have an indexer, then every third layer. Layer 6 is the next-token
        # module.
        ({"index_topk_freq": 3}, [0, 1, 4, 6]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [0, 2, 4, 6]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6]),
    ],
)
def test_layers_with_an_indexer(tmp_path: Path, changes: dict[str, Any], layers: list[int]) -> None:
    assert layers_of(tmp_path, **changes) == layers


@pytest.mark.parametrize(
    "changes",
    [
        {"indexer_types": ["full"] * 5},
        {"indexer_types": ["full", "none", "full", "full", "full", "full"]},
        {"index_topk_pattern": "SFFFFF"},
        {"index_topk_pattern": "FXFFFF"},
    ],
)
def test_impossible_kinds_of_indexers_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="full for the first layer"):
        read(tmp_path, GLM, **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"index_head_dim": 64}, "64 heads of 128 elements"),
        ({"index_n_heads": 96}, "index_n_heads is 96"),
        ({"index_topk": 2500}, "index_topk is 2500"),
        ({"index_topk": 9216}, "index_topk is 9216"),
        ({"index_head_dim": None}, "index_head_dim is missing"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"kv_lora_rank": 256}, "kv_lora_rank is 256"),
        ({"qk_nope_head_dim": 100}, "multiples of 16"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types is dense"),
    ],
)
def test_sizes_that_no_operator_takes_are_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        read(tmp_path, V32, **changes)


def test_a_list_says_which_layers_have_experts(tmp_path: Path) -> None:
    kinds = ["dense", "sparse", "dense", "sparse", "sparse", "dense"]

    spec = read(tmp_path, GLM, mlp_layer_types=kinds)

    assert spec.experts is not None and spec.experts.layers == {1, 3, 4, 6}


def test_a_dense_model_has_no_indexer(tmp_path: Path) -> None:
    assert read(tmp_path, V3).indexer is None


def test_blocks_of_index_keys_are_limited(tmp_path: Path) -> None:
    spec = read(tmp_path, GLM)
    parallel = {"tp": 16, "dcp": 16}

    check_model(make_config({"model": str(tmp_path), "parallel": {"tp": 8, "dcp": 8}}), spec)
    check_model(make_config({"model": "m", "parallel": parallel, "kv": {"block_size": 64}}), spec)
    with pytest.raises(ConfigError, match=r"128 and parallel\.dcp 16.* to 64 or less"):
        check_model(make_config({"model": str(tmp_path), "parallel": parallel}), spec)


def test_every_shard_keeps_all_index_keys(tmp_path: Path) -> None:
    spec = read(tmp_path, V32)
    one, eight = (
        KVCacheSpec.from_config(
            make_config({"model": str(tmp_path), "parallel": {"tp": 8, "dcp": dcp}}), spec
        )
        for dcp in (1, 8)
    )

    layers, block = spec.num_layers, one.block_size
    assert eight.tokens_per_block == 8 * block
    assert one.bytes_per_block == layers * block * (576 + 128) * 2
    assert eight.bytes_per_block == layers * block * (576 + 8 * 128) * 2


def test_indexers_are_whole_on_every_rank(tmp_path: Path) -> None:
    spec = read(tmp_path, V32)
    one = 1536 * 64 * 128 + 7168 * 128 + 7168 * 64 + 2 * 128

    for tp, drafts, count in ((1, False, 61), (8, False, 61), (8, True, 62)):
        parts = dict(weight_parts(spec, tp=tp, ep=1, element_bytes=1, drafts=drafts))
        assert parts["indexers"] == count * one


def test_a_latent_in_int8_has_its_scales_in_its_row(tmp_path: Path) -> None:
    spec = read(tmp_path, V32)
    config = make_config({"model": str(tmp_path), "kv": {"dtype": "int8"}})

    cache = KVCacheSpec.from_config(config, spec)

    # a row: 512 values, 64 elements of two bytes, and 4 scales of four bytes
    assert cache.bytes_per_block == spec.num_layers * 128 * ((512 + 128 + 16) + 128 * 2)


def test_only_layers_with_an_indexer_cache_index_keys(tmp_path: Path) -> None:
    spec = read(tmp_path, GLM, index_topk_pattern="FSSFSS")

    for num_drafts, num_layers, num_indexers in ((0, 6, 2), (1, 7, 3)):
        config = make_config({"model": str(tmp_path), "speculative": {"num_tokens": num_drafts}})
        cache = KVCacheSpec.from_config(config, spec)
        assert cache.paged == (
            PagedTensor(num_layers, 576),
            PagedTensor(num_indexers, 128, is_whole=True),
        )
