"""Whole models with weights of four bits are compared with models that have the same weights in
bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_aclgraph.comm.groups import ONE_RANK
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.decoder import Decoder
from dist_aclgraph.models.dummy_weights import DummyCheckpoint
from dist_aclgraph.shapes.families import read_model_spec
from dist_aclgraph.shapes.int4_formats import read_int4_formats
from dist_aclgraph.shapes.model_config import read_model_config
from dist_aclgraph.shapes.weight_sizes import weight_parts
from tests.checkpoints import make_prompts, make_reference
from tests.engine.runners import MAX_LEN
from tests.engine.weights.test_w8a8_models import (
    BFLOAT16,
    generate,
    logits_of,
    relative_error,
    tensors_of,
)
from tests.int4_checkpoints import (
    EXPERTS_ONLY,
    Writer,
    bytes_each,
    compressed_config,
    kept,
    packed_ints,
    pairs_of_inputs,
    pairs_of_outputs,
    pairs_with_two_scales,
    rewrite,
)

# The sizes are multiples of 256, the largest group of weights with one scale. Each rank's part of a
# size is a multiple of 8.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
MOE = SIZES | {"moe_intermediate_size": 256}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": SIZES,
    "Qwen3MoeForCausalLM": MOE,
    "DeepseekV3ForCausalLM": MOE | {"q_lora_rank": 256},
}


def all_of(group: int | None, writer: Writer) -> Callable[[str], tuple[int | None, Writer] | None]:
    return lambda module: None if kept(module) else (group, writer)


def experts_of(group: int | None, writer: Writer) -> Any:
    return lambda module: None if kept(module, EXPERTS_ONLY) else (group, writer)


@pytest.fixture(scope="module")
def sources(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for architecture, sizes in MODELS.items():
        made[architecture] = tmp_path_factory.mktemp("model")
        make_reference(architecture, made[architecture], **sizes)
    return made


def described(kind: str, group: int | None) -> dict[str, Any]:
    return {"kind": kind, "description": {"version": "1.0.0", "group_size": group or 0}}


# Models in which only weights are quantised; the inputs of products (rows) are floats. For each
# model: architecture, writer of weights in a published format, and further arguments.
FLOAT_ROWS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "Kimi K2": (
        "DeepseekV3ForCausalLM",
        experts_of(32, packed_ints),
        {"config": {"quantization_config": compressed_config(32)}},
    ),
    "ModelSlim by groups": (
        "Qwen3MoeForCausalLM",
        all_of(128, pairs_of_outputs),
        described("W4A16", 128),
    ),
    "ModelSlim by outputs": (
        "Qwen3ForCausalLM",
        all_of(None, pairs_of_inputs),
        described("W4A16", None),
    ),
    "all of latent attention": (
        "DeepseekV3ForCausalLM",
        all_of(32, bytes_each),
        described("W4A16", 32),
    ),
}
INT8_ROWS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "ModelSlim by outputs": (
        "DeepseekV3ForCausalLM",
        experts_of(None, pairs_of_outputs),
        described("W4A8_DYNAMIC", None),
    ),
    "ModelSlim by groups": (
        "Qwen3MoeForCausalLM",
        all_of(256, pairs_with_two_scales),
        described("W4A8_DYNAMIC", 256),
    ),
    "compressed-tensors": (
        "Qwen3MoeForCausalLM",
        experts_of(None, bytes_each),
        {
            "config": {
                "quantization_config": compressed_config(None, "int-quantized", int8_rows=True)
            }
        },
    ),
    "one matrix": ("Qwen3ForCausalLM", all_of(None, bytes_each), described("W4A8_DYNAMIC", None)),
}


def load(npu: Npu, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    spec = read_model_spec(directory)
    int4 = read_int4_formats(read_model_config(directory))
    checkpoint = Checkpoint(directory, dtype, names=spec.names, int4=int4)
    return Decoder(spec, ONE_RANK, checkpoint, device=npu.device, max_len=MAX_LEN)


@pytest.mark.parametrize("name", FLOAT_ROWS)
def test_tokens_are_those_of_the_same_weights_in_bfloat16(
    npu: Any, sources: dict[str, Path], tmp_path: Path, name: str
) -> None:
    architecture, writer_of, how = FLOAT_ROWS[name]
    quantised, floats = rewrite(sources[architecture], tmp_path, writer_of, **how)

    want = generate(npu, floats, BFLOAT16)

    assert generate(npu, quantised, BFLOAT16) == want
    assert generate(npu, quantised, BFLOAT16, in_graphs=True) == want


@pytest.mark.parametrize("name", INT8_ROWS)
def test_logits_with_int8_rows_are_near_those_of_bfloat16(
    npu: Any, sources: dict[str, Path], tmp_path: Path, name: str
) -> None:
    architecture, writer_of, how = INT8_ROWS[name]
    quantised, floats = rewrite(sources[architecture], tmp_path, writer_of, **how)
    (prompt,) = make_prompts([40])

    got, want = (
        logits_of(npu, load(npu, directory), prompt, torch.bfloat16)
        for directory in (quantised, floats)
    )

    # The weights of both models are equal. In one model, the inputs of each product are quantised,
    # which adds a relative error of about 0.01; there are about a dozen products in a row.
    # Different choices of experts add an error of about the same size.
    assert 0 < relative_error(got, want) < 0.1
    eager = generate(npu, quantised, BFLOAT16)
    assert generate(npu, quantised, BFLOAT16, in_graphs=True) == eager


@pytest.mark.parametrize("name", ["ModelSlim by outputs", "one matrix"])
def test_logits_with_int8_rows_are_those_of_the_same_values_in_int8(
    npu: Any, sources: dict[str, Path], tmp_path: Path, name: str
) -> None:
    architecture, (narrow, wide) = INT8_ROWS[name][0], (tmp_path / "narrow", tmp_path / "wide")
    writer_of = INT8_ROWS[name][1]
    for folder in (narrow, wide):
        folder.mkdir()
    in_int4, _ = rewrite(sources[architecture], narrow, writer_of, **INT8_ROWS[name][2])
    in_int8, _ = rewrite(
        sources[architecture],
        wide,
        lambda module: (None, bytes_each) if writer_of(module) else None,
        **described("W8A8_DYNAMIC", None),
    )
    (prompt,) = make_prompts([40])

    got, want = (
        logits_of(npu, load(npu, directory), prompt, torch.bfloat16)
        for directory in (in_int4, in_int8)
    )

    # Both models multiply the same integers, without rounding. Only the rounding errors of float32
    # sums can differ. They seldom change a result in bfloat16.
    assert relative_error(got, want) < 0.005


@pytest.mark.parametrize("name", ["Kimi K2", "ModelSlim by outputs"])
def test_weights_without_files_have_the_types_and_shapes_of_a_checkpoint(
    npu: Any, sources: dict[str, Path], tmp_path: Path, name: str
) -> None:
    architecture, writer_of, how = {**INT8_ROWS, "Kimi K2": FLOAT_ROWS["Kimi K2"]}[name]
    quantised, _ = rewrite(sources[architecture], tmp_path, writer_of, **how)
    spec = read_model_spec(quantised)
    dummy = DummyCheckpoint(
        torch.bfloat16,
        device=npu.device,
        quantises=False,
        int4=read_int4_formats(read_model_config(quantised)),
    )

    made = Decoder(spec, ONE_RANK, dummy, device=npu.device, max_len=MAX_LEN)

    assert [(t.dtype, t.shape) for t in tensors_of(made)] == [
        (t.dtype, t.shape) for t in tensors_of(load(npu, quantised))
    ]


@pytest.mark.parametrize("name", ["Kimi K2", "all of latent attention"])
def test_a_plan_counts_the_bytes_that_are_loaded(
    npu: Any, sources: dict[str, Path], tmp_path: Path, name: str
) -> None:
    architecture, writer_of, how = FLOAT_ROWS[name]
    quantised, _ = rewrite(sources[architecture], tmp_path, writer_of, **how)
    spec = read_model_spec(quantised)
    assert spec.experts is not None

    loaded = {t.data_ptr(): t for t in tensors_of(load(npu, quantised)) if t.dtype == torch.int32}

    parts = dict(weight_parts(spec, tp=1, ep=1, element_bytes=2))
    offsets = parts.pop("offsets of experts")
    assert offsets == spec.experts.num_experts * 256 // 32 * 512 * 2
    floats = replace(spec, int4=())
    wide = sum(part.bytes for part in weight_parts(floats, tp=1, ep=1, element_bytes=2))
    packed = sum(t.nbytes for t in loaded.values() if t.dim() > 1)
    assert wide - sum(parts.values()) == 4 * packed - packed - packed // 8
