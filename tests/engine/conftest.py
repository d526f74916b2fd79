from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import add_next_token_module, make_reference

NUM_GUESSABLE = 5  # vocabulary size of the model ``guessable``


@pytest.fixture(scope="session")
def checkpoint(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    make_reference("Qwen3ForCausalLM", directory)
    return directory


@pytest.fixture(scope="session")
def deepseek(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("deepseek")
    make_reference("DeepseekV3ForCausalLM", directory)
    return directory


@pytest.fixture(scope="session")
def sparse(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with sparse latent attention. Its last layer attends to the keys that an earlier
    layer has chosen.
    """
    directory = tmp_path_factory.mktemp("sparse")
    indexers = ["full", "full", "shared"]
    make_reference("GlmMoeDsaForCausalLM", directory, num_hidden_layers=3, indexer_types=indexers)
    return directory


@pytest.fixture(scope="session")
def hybrid(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with linear and full attention, and a next-token module."""
    directory = tmp_path_factory.mktemp("hybrid")
    make_reference("Qwen3NextForCausalLM", directory)
    add_next_token_module(directory)
    return directory


@pytest.fixture(scope="session")
def kimi_linear(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which some layers have linear attention with one decay per channel, and the other
    layers have latent attention.
    """
    directory = tmp_path_factory.mktemp("kimi-linear")
    make_reference("KimiLinearForCausalLM", directory)
    return directory


@pytest.fixture(scope="session")
def guessable(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with so small a vocabulary that even random drafts are often right."""
    directory = tmp_path_factory.mktemp("guessable")
    make_reference("Qwen3NextForCausalLM", directory, vocab_size=NUM_GUESSABLE)
    add_next_token_module(directory)
    return directory
