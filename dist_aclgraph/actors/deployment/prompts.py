"""Prompts and arguments that ``LLM`` takes from its user."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from dist_aclgraph.errors import InvalidParameterError

Prompt = str | Sequence[int] | Mapping[str, Any]
FORMS = "a prompt must be text or a list of token ids"
# Arguments of vLLM that must be None, and why.
ABSENT = {
    "lora_request": "LoRA is not offered: merge the weights into the checkpoint",
    "mm_processor_kwargs": "prompts are texts",
    "pooling_params": "the checkpoint tells how its states are pooled; embed has dimensions",
}


def check_absent(**given: object) -> None:
    """Refuse arguments of ``ABSENT`` that have a value."""
    for name, value in given.items():
        if value is not None:
            raise InvalidParameterError(f"{name} is given, but {ABSENT[name]}", name)


def listed(prompts: Prompt | Iterable[Prompt]) -> Sequence[Prompt]:
    """Return a list of prompts, even for a single prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidParameterError(f"prompts is {prompts!r:.80}; {FORMS}", "prompts")
    items = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [cast(Sequence[int], items)]
    return cast(Sequence[Prompt], items)


def token_ids(given: Iterable[int]) -> list[int]:
    """Return token ids, which may be integers of numpy, as a list of integers."""
    try:
        return [operator.index(token_id) for token_id in given]
    except TypeError:
        raise InvalidParameterError(FORMS, "prompt") from None


def as_prompt(prompt: Prompt) -> tuple[str | None, Sequence[int] | None]:
    """Return text and token ids of a prompt; each is None if the prompt does not contain it."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, prompt
    given = {key: value for key, value in prompt.items() if value is not None}
    if unknown := given.keys() - {"prompt", "prompt_token_ids"}:
        raise InvalidParameterError(
            f"a prompt has {', '.join(sorted(unknown))}; it may have prompt or prompt_token_ids",
            "prompt",
        )
    if not given:
        raise InvalidParameterError("a prompt must have prompt or prompt_token_ids", "prompt")
    return given.get("prompt"), given.get("prompt_token_ids")
