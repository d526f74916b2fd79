"""Compares an operator's results with plain torch, and the text of its errors with the names of
rules.
"""

from collections.abc import Callable

import pytest
import torch

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}


def assert_close(got: torch.Tensor, want: torch.Tensor, scale: float = 1) -> None:
    tolerance = TOLERANCE[got.dtype] * scale
    assert torch.allclose(got.cpu().float(), want.float(), atol=tolerance, rtol=tolerance)


def refused(rule: str, call: Callable[[], object], operator: str = "") -> None:
    """Check that ``call`` is refused, and that the error names ``rule``, and also ``operator`` if
    it is given.
    """
    with pytest.raises(RuntimeError) as error:
        call()
    assert rule in str(error.value)
    assert not operator or f"{operator}: " in str(error.value)


def refused_by(operator: str, rule: str, call: Callable[[], object]) -> None:
    """Check that ``operator`` refuses ``call``, and that the error names ``rule``."""
    refused(rule, call, operator)
