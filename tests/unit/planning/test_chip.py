"""The rules of a chip refuse some settings. For each rule, the tests also try a similar setting
that is accepted.
"""

from __future__ import annotations

from typing import Any

import pytest

from dist_aclgraph.config import make_config
from dist_aclgraph.config.chips import generation_of, is_cann_before
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.chip import Chip
from dist_aclgraph.shapes.model_facts import ModelFacts


def facts(**other: Any) -> ModelFacts:
    known: dict[str, Any] = {
        "architecture": "Qwen3ForCausalLM",
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 128,
        "context_len": 4096,
    }
    return ModelFacts(**{**known, **other})


LATENT = {"latent_size": 576, "num_kv_heads": 8}
ALONE = {"num_kv_heads": 8}  # every query head has its own keys
EXACT = {"recovery": {"exact": True}}
SHARDED = {"parallel": {"tp": 4, "dcp": 2}}


def check(cann: str, model: dict[str, Any], **keys: Any) -> None:
    config = make_config({"model": "m", **keys})
    Chip("Ascend910B1", cann).check_attention(config, facts(**model), "the NPU of rank 3")


@pytest.mark.parametrize(
    ("cann", "model", "keys", "why"),
    [
        ("9.1.0", {}, {"dtype": "float32"}, "dtype is float32"),
        ("8.5.0", {}, {"dtype": "float16"}, "dtype is float16"),
        ("9.1.0", ALONE, {"dtype": "float16"}, "dtype is float16"),
        ("9.1.0", LATENT, {"dtype": "float16"}, "dtype is float16"),
        ("8.5.0", {}, {"kv": {"block_size": 64}}, "kv.block_size is 64; .* multiples of 128"),
        ("9.1.0", ALONE, {"kv": {"block_size": 64}}, "kv.block_size is 64"),
        ("9.1.0", {}, {"kv": {"block_size": 528}}, "kv.block_size is 528; .* up to 512"),
        ("8.5.0", LATENT | {"latent_head_dim": 256}, {}, "heads are 256 wide; .* install CANN 9"),
        ("8.5.0", LATENT, {"kv": {"block_size": 64}}, "latent attention takes 16 and 128"),
        ("9.1.0", LATENT, {"kv": {"block_size": 640}}, "latent attention .* up to 512"),
        ("8.5.0", LATENT, {"parallel": {"tp": 2, "dcp": 2}}, "parallel.dcp is 2; latent .* 8.5.1"),
        ("8.5.0", {"head_dim": 96}, {}, "head size is 96; .*: install CANN 9"),
        (
            "9.1.0",
            {"head_dim": 96},
            {"parallel": {"tp": 8}},
            "head size is 96; .*: lower parallel.tp",
        ),
        ("9.1.0", {"head_dim": 512}, {}, "head size is 512; .*: use another model"),
        ("9.1.0", {**ALONE, "head_dim": 96}, {}, "head size is 96; .*: use another model"),
        ("8.5.0", {}, SHARDED, "parallel.dcp is 2 and .*: set both to 1, or install CANN 9"),
        ("8.5.0", {}, EXACT, "recovery.exact is true; .*: set it to false, or install CANN 9"),
        ("8.5.0", {}, {"parallel": {"pcp": 2}}, "parallel.pcp 2; .*: set both to 1, or install"),
        ("9.1.0", ALONE, {"parallel": {"pcp": 2}}, "parallel.pcp 2; .* set both to 1"),
        ("8.5.0", LATENT, SHARDED, "parallel.dcp is 2; latent attention gives no sums"),
        ("8.5.1", LATENT, {"kv": {"block_size": 64}}, "latent attention takes 16 and 128"),
        # If CANN's version is unknown, the stricter rules apply.
        ("", {}, {"kv": {"block_size": 64}}, "kv.block_size is 64; .* multiples of 128"),
        # Each rank has one query head and one KV head, so no two query heads share keys.
        ("9.1.0", {}, {"kv": {"block_size": 64}, "parallel": {"tp": 8}}, "kv.block_size is 64"),
    ],
)
def test_settings_that_a_chip_excludes_are_refused_with_key_and_device(
    cann: str, model: dict[str, Any], keys: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"{why}.*the NPU of rank 3: Ascend910B1, CANN {cann}"):
        check(cann, model, **keys)


@pytest.mark.parametrize(
    ("cann", "model", "keys"),
    [
        ("8.5.0", {}, {}),
        ("8.5.0", {"head_dim": 64}, {"kv": {"block_size": 256}}),
        ("9.1.0", {}, {"dtype": "float16"}),
        ("9.1.0", {"head_dim": 96}, {"kv": {"block_size": 16}}),
        ("8.5.0", LATENT, {"kv": {"block_size": 16}}),
        ("8.5.0", LATENT, {"parallel": {"tp": 2, "pcp": 2}}),
        ("8.5.1", LATENT, {"parallel": {"tp": 2, "dcp": 2}}),
        ("9.1.0", LATENT, {"parallel": {"tp": 2, "dcp": 2}}),
        ("9.1.0", LATENT, {"kv": {"block_size": 64}}),
        ("9.1.0", ALONE, {}),
        ("9.1.0", {}, SHARDED),
        ("9.1.0", {}, {"parallel": {"pcp": 2}}),
        ("8.5.0", LATENT, {"parallel": {"pcp": 2}}),
        # Each rank has one query head and one KV head, but it computes attention for the queries of
        # four ranks.
        ("9.1.0", {}, {"parallel": {"tp": 8, "dcp": 4}}),
    ],
)
def test_settings_that_a_chip_supports_are_accepted(
    cann: str, model: dict[str, Any], keys: dict[str, Any]
) -> None:
    check(cann, model, **keys)


@pytest.mark.parametrize(
    ("chip", "generation"),
    [("Ascend910B4", "A2"), ("Ascend910_9391", "A3"), ("Ascend950PR", "Ascend950PR")],
)
def test_the_name_of_a_chip_tells_its_generation(chip: str, generation: str) -> None:
    assert generation_of(chip) == generation


@pytest.mark.parametrize(
    ("cann", "is_before"),
    [
        ("", True),
        ("8.5", True),
        ("8.5.0", True),
        ("8.5.RC1", True),
        ("8.5.1", False),
        ("8.5.1.alpha001", False),
        ("8.10.RC1", False),
    ],
)
def test_a_candidate_comes_before_the_first_patch_release(cann: str, is_before: bool) -> None:
    assert is_cann_before(cann, 8, 5, 1) is is_before


def test_another_generation_than_plans_assume_is_refused_with_the_key_to_set() -> None:
    config = make_config({"model": "m", "device": {"kind": "npu"}})

    Chip("Ascend910B3", "9.1.0").check_assumed(config, "the NPU of rank 3")
    with pytest.raises(ConfigError, match=r"an Ascend910_9391 \(A3\).*set device.soc=Ascend"):
        Chip("Ascend910_9391", "9.1.0").check_assumed(config, "the NPU of rank 3")


@pytest.mark.parametrize(
    ("cann", "model", "counts"),
    [
        ("8.5.0", {}, True),
        ("9.1.0", {}, False),
        ("9.1.0", {"head_dim": 512}, True),
        ("9.1.0", ALONE, True),
        ("8.5.0", LATENT, False),
    ],
)
def test_where_attention_counts_shared_blocks_for_each_request(
    cann: str, model: dict[str, Any], counts: bool
) -> None:
    config, chip = make_config({"model": "m"}), Chip("Ascend910B1", cann)

    assert chip.counts_shared_blocks(config, facts(**model)) is counts
