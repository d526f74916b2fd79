from __future__ import annotations

from typing import Any

import pytest

from tests.graphs.attention_rows import AttentionDecoder


@pytest.fixture
def decoder(npu: Any) -> AttentionDecoder:
    return AttentionDecoder(npu)
