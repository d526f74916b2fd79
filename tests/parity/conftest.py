from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import add_next_token_module, greedy, make_prompts, make_reference

LENGTHS = (1, 2, 5, 17, 40, 64, 100, 127, 128, 129, 200, 300)
NUM_TOKENS = 64


@dataclass(frozen=True)
class Reference:
    """A checkpoint and what transformers generates from it."""

    directory: Path
    model: Any
    prompts: list[list[int]]
    tokens: list[list[int]]


@pytest.fixture(scope="session")
def references(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from an architecture to its reference, computed once."""
    known: dict[str, Reference] = {}

    def reference(architecture: str) -> Reference:
        if architecture not in known:
            directory = tmp_path_factory.mktemp(architecture)
            model = make_reference(architecture, directory)
            if architecture == "DeepseekV3ForCausalLM":
                add_next_token_module(directory)
            prompts = make_prompts(LENGTHS)
            tokens = greedy(model, prompts, NUM_TOKENS)
            known[architecture] = Reference(directory, model, prompts, tokens)
        return known[architecture]

    return reference
