"""Serve large language models on many Ascend NPUs, with graph plans negotiated across ranks.

Public names are imported when they are used: ``import dist_aclgraph`` imports neither torch nor
Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dist_aclgraph.sampling import SamplingParams, StructuredOutputs
from dist_aclgraph.version import VERSION

if TYPE_CHECKING:
    from dist_aclgraph.actors.deployment.llm import LLM as LLM
    from dist_aclgraph.serve.app import app as app

__version__ = VERSION
__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "__version__", "app"]

_LAZY = {"LLM": "dist_aclgraph.actors.deployment.llm", "app": "dist_aclgraph.serve.app"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
