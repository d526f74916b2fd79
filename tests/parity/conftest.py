from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import add_next_token_module, greedy, make_prompts, make_reference
from tests.parity.recorded import LENGTHS, LONG_CONTEXT, LONG_LENGTHS, NUM_TOKENS, recorded_tokens

WITH_NEXT_TOKEN_MODULE = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")


@dataclass(frozen=True)
class Reference:
    """A checkpoint, and the tokens that transformers generates with it."""

    directory: Path
    model: Any
    prompts: list[list[int]]
    tokens: list[list[int]]


def remember(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: Sequence[int],
    recorded: str = "",
    **overrides: Any,
) -> Any:
    """Return a function that returns the reference of an architecture. The function makes each
    reference only once.

    Args:
        lengths: lengths of the prompts.
        recorded: the part of the recorded tokens (see ``recorded.py``) to use. If ``recorded`` is
            "", transformers generates the tokens, which takes a minute for long prompts.
        overrides: settings of the model that replace the usual settings.
    """
    known: dict[str, Reference] = {}

    def reference(architecture: str) -> Reference:
        if architecture not in known:
            directory = tmp_path_factory.mktemp(architecture)
            model = make_reference(architecture, directory, **overrides)
            if architecture in WITH_NEXT_TOKEN_MODULE:
                add_next_token_module(directory)
            prompts = make_prompts(lengths)
            if recorded:
                tokens = recorded_tokens(recorded, architecture)
            else:
                tokens = greedy(model, prompts, NUM_TOKENS)
            known[architecture] = Reference(directory, model, prompts, tokens)
        return known[architecture]

    return reference


@pytest.fixture(scope="session")
def references(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return references for prompts that each fit into one step."""
    return remember(tmp_path_factory, LENGTHS, "short")


@pytest.fixture(scope="session")
def long_references(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return references for models with a long context. Some prompts need several steps."""
    return remember(tmp_path_factory, LONG_LENGTHS, "long", max_position_embeddings=LONG_CONTEXT)
