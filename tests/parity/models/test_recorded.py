"""The recorded tokens equal the tokens that transformers generates now."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkpoints import ARCHITECTURES
from tests.parity.recorded import PARTS, generate, recorded_tokens


# transformers computes linear attention with many small operators, which takes minutes.
@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.rare  # changes only with transformers' version
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("part", PARTS)
def test_recorded_tokens_are_those_of_transformers(npu: Any, part: str, architecture: str) -> None:
    assert generate(part, architecture) == recorded_tokens(part, architecture)
