"""If no operator can read a cache in int8, ``kv.dtype: int8`` is refused with one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import make_config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.shapes.model_facts import check_model, read_model_facts

SHAPES = Path(__file__).parents[3] / "configs" / "shapes"


def check(model: str, **settings: Any) -> None:
    raw = {"model": str(SHAPES / model), "kv": {"dtype": "int8"}, **settings}
    config = make_config(raw)
    check_model(config, read_model_facts(config.model))


@pytest.mark.parametrize("model", ["deepseek-v3.2", "glm-5", "deepseek-v3", "kimi-k2"])
def test_latent_attention_reads_latents_in_int8(model: str) -> None:
    check(model, parallel={"tp": 8, "pcp": 2})


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("qwen3-235b-a22b", {}, "only the latents of latent attention"),
        *(
            (
                model,
                {"parallel": {"tp": 8, "dcp": 2}},
                "gives no sums.*set kv.dtype=auto, whose shards take less memory than int8 without",
            )
            for model in ("deepseek-v3.2", "deepseek-v3")
        ),
    ],
)
def test_other_caches_in_int8_are_refused(
    model: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        check(model, **settings)

    assert "set kv.dtype=auto" in str(refused.value) and "\n" not in str(refused.value)
