"""Models with linear attention in some layers: their tokens equal those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import greedy, make_prompts, make_reference
from tests.engine.runners import Sequences, make_runner

HYBRIDS = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_prompts_and_decoding_equal_transformers(
    npu: Any, tmp_path: Path, architecture: str
) -> None:
    model = make_reference(architecture, tmp_path)
    prompts = make_prompts([20, 3, 1])
    sequences = Sequences(make_runner(npu, tmp_path), prompts)

    sequences.prefill()
    for _ in range(8):
        sequences.decode(None)

    assert sequences.new == greedy(model, prompts, 9)
