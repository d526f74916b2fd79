"""gpt-oss with experts in MXFP4, as published, generates the same tokens as transformers with
dequantised weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dist_aclgraph.errors import UnsupportedModelError
from dist_aclgraph.models import mxfp4
from dist_aclgraph.models.checkpoint import Checkpoint
from tests.checkpoints import greedy, make_prompts, make_reference
from tests.deployments import greedy_params, make_deployment_config
from tests.lockstep import lockstep

GROUP, BYTES = 32, 16


def test_values_are_those_of_transformers(npu: Any) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 40, 5, BYTES), dtype=torch.uint8, generator=random)
    powers = torch.randint(90, 150, (3, 40, 5), dtype=torch.uint8, generator=random)

    for dtype in (torch.bfloat16, torch.float32):
        expected = convert_moe_packed_tensors(blocks, powers, dtype=dtype)
        for member in range(3):
            found = mxfp4.dequantise(blocks[member], powers[member], dtype)
            assert torch.equal(found.t(), expected[member])


@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_are_those_of_the_dequantised_model(npu: Any, tmp_path: Path, tp: int) -> None:
    """With two ranks, a rank has 48 of the 96 inner columns: one and a half groups of weights with
    a common scale.
    """
    model, prompts = publish(tmp_path), make_prompts([40, 3])

    config = make_deployment_config(tmp_path, parallel={"tp": tp})
    with lockstep(config) as group:
        answers = group.generate(prompts, greedy_params(9))

    assert [answer.tokens for answer in answers] == greedy(model, prompts, 9)


@pytest.mark.parametrize(
    ("end", "dtype", "found"),
    [("_blocks", torch.int8, "I8"), ("_scales", torch.float8_e8m0fnu, "F8_E8M0")],
)
def test_values_and_powers_of_another_type_are_refused(
    tmp_path: Path, end: str, dtype: torch.dtype, found: str
) -> None:
    stored = {
        "w_blocks": torch.zeros(1, 4, 1, BYTES, dtype=torch.uint8),
        "w_scales": torch.full((1, 4, 1), 127, dtype=torch.uint8),
    }
    save_file({**stored, f"w{end}": stored[f"w{end}"].view(dtype)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, torch.bfloat16)

    with pytest.raises(UnsupportedModelError, match=f"has the type {found}, .* supported are U8"):
        checkpoint.read_member("w", (1, GROUP, 4), 0, 0, 0, GROUP)


def publish(directory: Path) -> Any:
    """Write a random gpt-oss under the published names; return the model that transformers reads
    from these files.
    """
    from transformers import AutoModelForCausalLM, Mxfp4Config

    make_reference("GptOssForCausalLM", directory)
    weights = load_file(directory / "model.safetensors")
    random = torch.Generator().manual_seed(1)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        count, num_in, num_out = weights.pop(name).shape
        shape = (count, num_out, num_in // GROUP)
        weights[f"{name}_blocks"] = torch.randint(
            256, (*shape, BYTES), dtype=torch.uint8, generator=random
        )
        weights[f"{name}_scales"] = torch.randint(
            121, 125, shape, dtype=torch.uint8, generator=random
        )
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    path = directory / "config.json"
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantised}))
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    ).eval()
