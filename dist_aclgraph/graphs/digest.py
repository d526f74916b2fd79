"""A digest of the captured operators. If the digests of the ranks differ, the graph is not used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorDigest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hashes every operator that runs inside the context, collectives included.

    The hash covers the names of the operators, and the types and shapes of the operators' tensors.
    The hash covers no values, because weights and addresses differ between ranks.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hash = hashlib.sha256()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not prepare this class for its compiler, which this
        package never uses.

        The preparation would import the compiler at the start of each rank, which takes one second.
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
    """Return a tensor's type and shape, or "" for other values."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}"
    return ""
