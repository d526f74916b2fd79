from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_reference


@pytest.fixture(scope="session")
def checkpoint(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with four heads, two KV heads and three layers."""
    directory = tmp_path_factory.mktemp("qwen3")
    make_reference("Qwen3ForCausalLM", directory)
    return directory
