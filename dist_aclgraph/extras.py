"""Checks that the packages for optional commands are installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from dist_aclgraph.errors import MissingPackageError

Extra = Literal["plots", "bench", "modelscope", "otel"]


def require(package: str, extra: Extra, purpose: str) -> None:
    """Check that ``package`` can be imported.

    Raises:
        MissingPackageError: the package is not installed; the message names its extra.
    """
    try:
        is_installed = find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package of ``package`` is missing
        is_installed = False
    if not is_installed:
        raise MissingPackageError(
            f"{purpose} needs {package}, which is not installed: "
            f"pip install 'dist-aclgraph[{extra}]'"
        )
