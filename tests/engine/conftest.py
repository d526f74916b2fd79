from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_reference


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
