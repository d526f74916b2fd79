"""Rotary tables against those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_aclgraph.errors import UnsupportedModelError
from dist_aclgraph.layers.rotary import rope_tables
from dist_aclgraph.shapes.model_spec import read_model_spec
from tests.checkpoints import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, make_reference

DEFAULT = {"rope_type": "default", "rope_theta": 1e6}
SCHEMES = {
    "default": DEFAULT,
    "linear": LINEAR_ROPE,
    "llama3": LLAMA3_ROPE,
    "yarn": YARN_ROPE,
    "yarn-untruncated": {**YARN_ROPE, "truncate": False, "beta_fast": 16.0},
    "yarn-factor": {**YARN_ROPE, "attention_factor": 0.7},
    "yarn-mscale": {**YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 0.5},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tables_equal_those_of_transformers(npu: Any, tmp_path: Path, scheme: str) -> None:
    model = make_reference("Qwen3ForCausalLM", tmp_path, rope_parameters=SCHEMES[scheme])
    spec = read_model_spec(tmp_path)

    cos, sin = rope_tables(spec.rope, spec.head_dim, 512, torch.float32)

    expected_cos, expected_sin = model.model.rotary_emb(torch.zeros(1), torch.arange(512)[None])
    torch.testing.assert_close(cos, expected_cos[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(sin, expected_sin[0], rtol=0, atol=1e-5)


def test_an_unknown_scheme_is_refused(npu: Any, tmp_path: Path) -> None:
    make_reference(
        "Qwen3ForCausalLM",
        tmp_path,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    )

    with pytest.raises(UnsupportedModelError, match="dynamic"):
        read_model_spec(tmp_path)
