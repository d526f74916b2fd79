"""Fixtures for all tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

OUR_VARIABLES = ("ASCEND_", "HCCL_", "TASK_QUEUE_ENABLE", "DIST_ACLGRAPH_")

# Shared machines stall now and then: a deadline would measure them and not the code.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget variables that change what we do, so that a test sees the same on every machine."""
    for name in list(os.environ):
        if name.startswith(OUR_VARIABLES):
            monkeypatch.delenv(name)
