"""Makes deployments for a model that consists only of a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import Config, make_config

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "vocab_size": 1000,
    "intermediate_size": 512,
}


def make(checkpoint: Path, **sections: Any) -> Config:
    """Return a configuration with decode graphs of the sizes 1, 2, 4 and 8, and with a documented
    budget model.
    """
    graph = {"budget_model": "cann-pinned", "lazy": "off", "rebucket_s": 0.0}
    raw = {
        "model": str(checkpoint),
        "kv": {"block_size": 16, "num_blocks": 65},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 32},
        **sections,
        "graph": {**graph, **sections.get("graph", {})},
    }
    return make_config(raw)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SHAPE))
    return directory
