"""If experts must be quantised to int8, a checkpoint with all experts in one tensor is refused
before ranks load it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dist_aclgraph.config import make_config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.shapes.servable import read_servable_spec

SHAPE = Path(__file__).parents[3] / "configs" / "shapes" / "qwen3.5-397b-a17b"
LAYER = "model.language_model.layers.0.mlp.experts"
JOINED = f"{LAYER}.gate_up_proj"
SEPARATE = f"{LAYER}.0.gate_proj.weight"


def read(directory: Path, *tensors: str, weights: str = "checkpoint") -> None:
    shutil.copy(SHAPE / "config.json", directory)
    if tensors:
        zeros = {name: np.zeros(1, np.float32) for name in tensors}
        save_file(zeros, directory / "model.safetensors")
    keys = {"quantization": "w8a8", "weights": weights, "parallel": {"tp": 8, "ep": 8}}
    read_servable_spec(make_config({"model": str(directory), **keys}))


@pytest.mark.parametrize("tensors", [(), (JOINED,), (SEPARATE, JOINED)], ids=len)
def test_experts_in_one_tensor_are_not_made_int8(tmp_path: Path, tensors: tuple[str, ...]) -> None:
    """If the weight files are missing, the experts are expected in the form in which the authors
    publish them.
    """
    with pytest.raises(ConfigError, match="w8a8; the experts of a layer are one tensor"):
        read(tmp_path, *tensors)


def test_separate_experts_and_dummy_weights_become_int8(tmp_path: Path) -> None:
    read(tmp_path, SEPARATE)
    read(tmp_path, JOINED, weights="dummy")
