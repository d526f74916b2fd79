"""Converts fields of a request to sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.sampling import SamplingParams

# In several APIs, the fields with these names limit the tokens of the reasoning.
BUDGETS = ("thinking_tokens", "thinking_token_budget", "thinking_budget")


def make_params(given: Mapping[str, Any], names: Mapping[str, str]) -> SamplingParams:
    """Return sampling parameters; errors contain the client's names of the parameters.

    Args:
        names: the client's names of the parameters that have other names in ``SamplingParams``.
    """
    try:
        return SamplingParams(**given)
    except InvalidParameterError as e:
        if e.param is None or e.param not in names:
            raise
        name = names[e.param]
        raise InvalidParameterError(str(e).replace(e.param, name, 1), name) from None


def first_given(body: object, *names: str) -> str:
    """Return the first of ``names`` whose field has a value. If no field has a value, return
    ``names[0]``.
    """
    return next((name for name in names if getattr(body, name) is not None), names[0])


def without_none(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that have a value."""
    return {name: value for name, value in given.items() if value is not None}


def ends_without_effect(params: SamplingParams) -> list[str]:
    """Return the fields for stop tokens that have no effect. If there is an output format, the
    format decides where the answer ends.
    """
    if params.structured_outputs is None:
        return []
    return [name for name in ("stop_token_ids", "ignore_eos") if getattr(params, name)]
