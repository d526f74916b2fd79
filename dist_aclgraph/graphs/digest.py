"""A name for what was captured: ranks that recorded different operators find out before replay."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorDigest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hashes every operator that runs inside, collectives included: its name, and the type and
    shape of its tensors. Values do not count: weights and addresses differ from rank to rank.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hash = hashlib.sha256()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch that nothing has to be kept from its compiler, which is never used here: it
        would be imported for that alone, with a second of each rank's start.
        """
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        tensors = [describe(value) for value in torch.utils._pytree.tree_leaves(args)]
        self._hash.update(f"{func} {tensors}\n".encode())
        return func(*args, **(kwargs or {}))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def describe(value: Any) -> str:
    """Return a tensor's type and shape; of anything else, nothing."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}"
    return ""
