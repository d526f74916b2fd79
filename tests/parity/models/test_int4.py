"""On several ranks, weights of four bits give the same tokens as the same weights in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_reference
from tests.int4_checkpoints import (
    EXPERTS_ONLY,
    bytes_each,
    compressed_config,
    kept,
    packed_ints,
    pairs_of_outputs,
    rewrite,
)
from tests.parity.models.test_int8 import generate as generate_in
from tests.slow import slow

SIZES = {"num_hidden_layers": 2, "hidden_size": 128, "moe_intermediate_size": 128}


def generate(
    directory: Path, parallel: dict[str, int], fusions: str | list[str] = "auto"
) -> list[list[int]]:
    return generate_in(directory, parallel, "FULL_DECODE_ONLY", None, fusions)


@pytest.mark.parametrize(
    "parallel",
    [{"tp": 2, "ep": 2}, slow({"tp": 2}), slow({"tp": 2, "dp": 2, "ep": 4})],
    ids=["whole experts", "split experts", "whole experts of two groups"],
)
def test_kimi_k2_as_published_gives_the_tokens_of_its_dequantised_weights(
    npu: Any, tmp_path: Path, parallel: dict[str, int]
) -> None:
    source = tmp_path / "source"
    make_reference("DeepseekV3ForCausalLM", source, **SIZES)
    quantised, floats = rewrite(
        source,
        tmp_path,
        lambda module: None if kept(module, EXPERTS_ONLY) else (32, packed_ints),
        config={"quantization_config": compressed_config(32)},
    )

    want = generate(floats, parallel)

    assert [len(tokens) for tokens in want] == [8, 8]
    assert generate(quantised, parallel) == want


@pytest.mark.parametrize("parallel", [{"tp": 2, "ep": 2}, slow({"tp": 2})], ids=["whole", "split"])
def test_modelslim_w4a8_beside_w8a8_gives_the_tokens_of_the_same_values_in_int8(
    npu: Any, tmp_path: Path, parallel: dict[str, int]
) -> None:
    source = tmp_path / "source"
    make_reference("Qwen3MoeForCausalLM", source, **SIZES)
    made = []
    for kind, writer in (("W4A8_DYNAMIC", pairs_of_outputs), ("W8A8_DYNAMIC", bytes_each)):
        (tmp_path / kind).mkdir()
        quantised, _ = rewrite(
            source,
            tmp_path / kind,
            lambda module, writer=writer: None if kept(module, EXPERTS_ONLY) else (None, writer),
            description={"version": "1.0.0", "group_size": 0},
            kind=kind,
            others="W8A8_DYNAMIC",
        )
        made.append(quantised)
    in_int4, in_int8 = made

    # The experts in int8 must not use a fused SwiGLU operator, because no such operator exists for
    # experts in four bits.
    common = ["norm_quant", "swiglu_quant", "routing_quant", "nz_weights"]
    want = generate(in_int8, parallel, common)

    assert generate(in_int4, parallel, common) == want


def test_modelslim_w4a16_gives_the_tokens_of_its_dequantised_weights(
    npu: Any, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    make_reference("Qwen3MoeForCausalLM", source, **SIZES, intermediate_size=256)
    quantised, floats = rewrite(
        source,
        tmp_path,
        lambda module: None if kept(module) else (64, pairs_of_outputs),
        description={"version": "1.0.0", "group_size": 64},
        kind="W4A16",
    )
    want = generate(floats, {"tp": 2})

    assert generate(quantised, {"tp": 2}) == want
