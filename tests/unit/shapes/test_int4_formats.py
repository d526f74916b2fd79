"""The matrices whose weights have four bits, and the bytes that a plan counts for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import ParallelConfig, make_config
from dist_aclgraph.errors import ConfigError, ModelError, UnsupportedModelError
from dist_aclgraph.shapes.families import read_model_spec
from dist_aclgraph.shapes.int4_formats import Int4Format, read_int4_formats
from dist_aclgraph.shapes.int4_shares import check_int4_shares
from dist_aclgraph.shapes.model_config import read_model_config
from dist_aclgraph.shapes.model_facts import check_model
from dist_aclgraph.shapes.servable import read_servable_spec
from dist_aclgraph.shapes.weight_sizes import weight_parts
from tests.unit.shapes.test_indexer_spec import V32
from tests.unit.shapes.test_linear_spec import NEXT_80B
from tests.unit.shapes.test_model_spec import V3
from tests.unit.shapes.test_quantised_formats import INPUTS, INT4, WEIGHTS, compressed, packed

# In the published Kimi K2 Thinking, only routed experts have four bits.
OTHERS = (
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
)
KIMI = packed(ignore=list(OTHERS))
EXPERT = "model.layers.3.mlp.experts.7.up_proj"
SMALL = NEXT_80B | {"linear_num_value_heads": 16}
OF_32 = Int4Format(quantises_rows=False, group=32)


def write(
    directory: Path, quantisation: Any = None, description: Any = None, **others: Any
) -> Path:
    config = V3 | {"quantization_config": quantisation} | others
    (directory / "config.json").write_text(json.dumps(config))
    if description:
        (directory / "quant_model_description.json").write_text(json.dumps(description))
    return directory


def form_of(directory: Path, module: str) -> Int4Format | None:
    return read_int4_formats(read_model_config(directory)).of(f"{module}.weight")


def test_ignored_matrices_and_other_tensors_do_not_have_four_bits(tmp_path: Path) -> None:
    formats = read_int4_formats(read_model_config(write(tmp_path, KIMI)))

    assert formats.of(f"{EXPERT}.weight") == OF_32
    for module in ("self_attn.o_proj", "mlp.shared_experts.up_proj", "mlp.down_proj"):
        assert formats.of(f"model.layers.3.{module}.weight") is None
    assert formats.of(f"{EXPERT}.bias") is None
    parts = {matrix.part for matrix in read_model_spec(tmp_path).int4}
    assert "experts" in parts
    assert not parts & {"attention", "dense MLPs", "shared experts"}


def test_the_first_group_with_a_matching_target_counts(tmp_path: Path) -> None:
    group = {"targets": ["re:.*self_attn.*"], "weights": WEIGHTS, "input_activations": INPUTS}
    experts = {"targets": ["re:.*experts.*", EXPERT], "weights": INT4, "input_activations": None}
    write(tmp_path, compressed(config_groups={"group_0": group, "group_1": experts}))

    assert form_of(tmp_path, EXPERT) == OF_32
    assert form_of(tmp_path, "model.layers.3.self_attn.q_proj") is None
    assert form_of(tmp_path, "model.layers.0.mlp.up_proj") is None


@pytest.mark.parametrize(
    ("kind", "group", "form"),
    [
        ("W4A16", 32, OF_32),
        ("W4A16", 0, Int4Format(quantises_rows=False, group=None)),
        ("W4A8_DYNAMIC", 256, Int4Format(quantises_rows=True, group=256)),
        ("W8A8_DYNAMIC", 256, None),
    ],
)
def test_a_description_names_each_matrix(
    tmp_path: Path, kind: str, group: int, form: Int4Format | None
) -> None:
    write(tmp_path, None, {"group_size": group, f"{EXPERT}.weight": kind})

    assert form_of(tmp_path, EXPERT) == form
    assert form_of(tmp_path, EXPERT.replace("7", "8")) is None


def test_a_pattern_that_is_no_regular_expression_is_an_error_of_the_model(tmp_path: Path) -> None:
    write(tmp_path, packed(ignore=["re:("]))

    with pytest.raises(ModelError, match=r"ignore has 're:\(', which is no regular expression"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize("pattern", ["re:(.+)+!", "re:" + ".*a" * 6])
def test_an_expression_that_may_need_years_is_refused(tmp_path: Path, pattern: str) -> None:
    write(tmp_path, packed(ignore=[pattern]))

    with pytest.raises(UnsupportedModelError, match="expressions without repeated groups"):
        read_model_spec(tmp_path)


def bytes_of(directory: Path, **layout: int) -> dict[str, int]:
    sizes = {"tp": 1, "ep": 1, "element_bytes": 2} | layout
    return dict(weight_parts(read_model_spec(directory), **sizes))


@pytest.mark.parametrize("layout", [{}, {"tp": 8, "ep": 32}])
def test_only_parts_with_four_bits_become_smaller(tmp_path: Path, layout: dict[str, int]) -> None:
    wide = bytes_of(write(tmp_path), **layout)
    narrow = bytes_of(write(tmp_path, KIMI), **layout)

    # An element has half a byte in place of two bytes, and 32 elements share a scale of two bytes.
    assert narrow["experts"] == wide["experts"] * 9 // 32
    assert narrow.pop("offsets of experts") == wide["experts"] // V3_SPARSE // 2 * 2 // 3 // 16
    assert wide | {"experts": narrow["experts"]} == narrow


V3_SPARSE = V3["num_hidden_layers"] - V3["first_k_dense_replace"]


@pytest.mark.parametrize(
    ("group", "kind", "parallel", "refused"),
    [
        (32, "W4A16", {"tp": 8}, ""),
        (32, "W4A16", {"tp": 128}, "16 on each rank; this must be a multiple of 32"),
        (0, "W4A16", {"tp": 128}, ""),
        (256, "W4A8_DYNAMIC", {"tp": 8}, ""),
        (256, "W4A8_DYNAMIC", {"tp": 16}, "128 on each rank; this must be a multiple of 256"),
        (0, "W4A8_DYNAMIC", {"tp": 16}, ""),
        (0, "W4A8_DYNAMIC", {"tp": 64}, r"a multiple of 64: .* parallel\.tp, or set parallel\.ep"),
        (256, "W4A8_DYNAMIC", {"tp": 128, "ep": 128}, ""),
    ],
)
def test_parts_of_ranks_that_no_operator_takes_are_refused(
    tmp_path: Path, group: int, kind: str, parallel: dict[str, int], refused: str
) -> None:
    name = "model.layers.3.mlp.experts.0.down_proj.weight"
    write(tmp_path, None, {"group_size": group, name: kind})
    config = make_config({"model": str(tmp_path), "parallel": parallel})

    if not refused:
        assert read_servable_spec(config).int4
        return
    with pytest.raises(ConfigError, match=f"experts .* inner width of 2048, .*{refused}"):
        read_servable_spec(config)


def test_experts_whose_hidden_states_no_operator_takes_are_refused(tmp_path: Path) -> None:
    """Each row is one quantisation group. So the hidden size is limited by the operator, but not by
    a group size.
    """
    name = "model.layers.3.mlp.experts.0.up_proj.weight"
    write(tmp_path, None, {"group_size": 0, name: "W4A8_DYNAMIC"}, hidden_size=7200)
    config = make_config({"model": str(tmp_path)})

    with pytest.raises(
        ConfigError, match=r"7200 inputs, the hidden size; .* a multiple of 64: keep"
    ):
        read_servable_spec(config)


@pytest.mark.parametrize(
    ("config", "name", "group", "tp", "message"),
    [
        (V3 | {"q_lora_rank": 192}, "self_attn.q_b_proj", 128, 1, "192 inputs in groups of 128"),
        (V32 | {"q_lora_rank": 192}, "self_attn.indexer.wq_b", 128, 1, "192 inputs in groups"),
        (V3 | {"q_lora_rank": 192}, "self_attn.o_proj", 128, 1, ""),
        (V3 | {"q_lora_rank": 1536}, "self_attn.q_b_proj", 128, 8, ""),
        (
            SMALL,
            "linear_attn.out_proj",
            256,
            16,
            r"128 on each rank.*multiple of 256.*parallel\.tp",
        ),
        (SMALL, "linear_attn.out_proj", 256, 8, ""),
        (SMALL, "linear_attn.in_proj_qkvz", 256, 16, ""),
        (V3 | {"hidden_size": 896}, "self_attn.q_a_proj", 256, 1, "896 inputs in groups of 256"),
        (V3 | {"hidden_size": 896}, "self_attn.o_proj", 256, 1, ""),
    ],
)
def test_matrices_inside_attention_are_checked_by_their_inputs(
    tmp_path: Path, config: dict[str, Any], name: str, group: int, tp: int, message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    kind = "W4A8_DYNAMIC" if group == 256 else "W4A16"
    described = {"group_size": group, f"model.layers.0.{name}.weight": kind}
    (tmp_path / "quant_model_description.json").write_text(json.dumps(described))
    spec = read_model_spec(tmp_path)
    assert [matrix.name for matrix in spec.int4] == [name]

    if not message:
        check_int4_shares(spec, ParallelConfig(tp=tp))
        return
    with pytest.raises(ConfigError, match=message):
        check_int4_shares(spec, ParallelConfig(tp=tp))


@pytest.mark.parametrize("other", ["W8A8_DYNAMIC", "FLOAT"])
def test_bytes_that_hold_four_bits_are_not_int8(tmp_path: Path, other: str) -> None:
    names = {f"{EXPERT}.weight": "W4A16", "model.layers.3.self_attn.o_proj.weight": other}
    types = {"W4A16": "I8", "W8A8_DYNAMIC": "I8", "FLOAT": "BF16"}
    header = {
        name: {"dtype": types[kind], "shape": [0], "data_offsets": [0, 0]}
        for name, kind in names.items()
    }
    text = json.dumps(header).encode()
    file = write(tmp_path, None, names) / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)

    facts = read_model_spec(tmp_path)

    assert facts.holds_int4
    assert facts.holds_int8 == (other == "W8A8_DYNAMIC")


def test_float32_is_refused(tmp_path: Path) -> None:
    config = make_config({"model": str(write(tmp_path, KIMI)), "dtype": "float32"})

    with pytest.raises(ConfigError, match=r"float32 and the checkpoint holds int4; .*bfloat16"):
        check_model(config, read_model_spec(tmp_path))


@pytest.mark.parametrize(
    "kept",
    [
        ["model.layers.3.mlp.experts.0.down_proj"],
        ["model.layers.3.mlp.experts.0.down_proj", "model.layers.60.mlp.experts.255.up_proj"],
        ["re:model.layers.5.mlp.experts.1.*"],
    ],
)
def test_each_matrix_that_a_tool_kept_in_floats_is_counted_in_floats(
    tmp_path: Path, kept: list[str]
) -> None:
    narrow = bytes_of(write(tmp_path, KIMI))["experts"]

    found = bytes_of(write(tmp_path, packed(ignore=[*OTHERS, *kept])))["experts"]

    count = sum(3 * 111 if name.startswith("re:") else 1 for name in kept)
    elements = V3["hidden_size"] * V3["moe_intermediate_size"]
    # As a float, an element takes two bytes. With four bits, it takes half a byte, and 32 elements
    # share a scale of two bytes.
    assert found - narrow == count * elements * 23 // 16


def test_a_matrix_of_attention_that_is_not_described_is_counted_in_floats(tmp_path: Path) -> None:
    wide = bytes_of(write(tmp_path))["attention"]
    names = [f"model.layers.{i}.self_attn.o_proj.weight" for i in (3, 4)]

    narrow = bytes_of(write(tmp_path, None, dict.fromkeys(names, "W4A16")))["attention"]

    elements = V3["hidden_size"] * V3["num_attention_heads"] * V3["v_head_dim"]
    assert wide - narrow == len(names) * elements * 3 // 2
