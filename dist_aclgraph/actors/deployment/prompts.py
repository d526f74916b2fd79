"""Prompts and arguments that users pass to ``LLM``."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

from dist_aclgraph.errors import InvalidParameterError

Prompt = str | Sequence[int] | Mapping[str, Any]
FORMS = "a prompt must be text or a list of token ids"
# The keys are arguments of vLLM that must be None. The values are the reasons.
ABSENT = {
    "lora_request": "LoRA is not offered: merge the weights into the checkpoint",
    "mm_processor_kwargs": "prompts are texts",
    "pooling_params": "the checkpoint tells how its states are pooled; embed has dimensions",
}


@dataclass(frozen=True)
class GivenPrompt:
    """A prompt that has text, token ids, or both.

    Attributes:
        cache_salt: only requests with the same salt share cached blocks.
    """

    text: str | None = None
    ids: Sequence[int] | None = None
    cache_salt: str = ""


def check_absent(**given: object) -> None:
    """Raise an error if an argument that ``ABSENT`` names is not None."""
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
    """Return token ids as a list of Python integers. The given ids may be integers of numpy."""
    try:
        return [operator.index(token_id) for token_id in given]
    except TypeError:
        raise InvalidParameterError(FORMS, "prompt") from None


def as_prompt(prompt: Prompt) -> GivenPrompt:
    """Return the text or the token ids of a user's prompt, and its cache salt.

    Raises:
        InvalidParameterError: the prompt has an unknown field, or it has neither text nor token
            ids.
    """
    if isinstance(prompt, str):
        return GivenPrompt(prompt)
    if not isinstance(prompt, Mapping):
        return GivenPrompt(ids=prompt)
    given = {key: value for key, value in prompt.items() if value is not None}
    if unknown := given.keys() - {"prompt", "prompt_token_ids", "cache_salt"}:
        raise InvalidParameterError(
            f"a prompt has {', '.join(sorted(unknown))}; it may have prompt or prompt_token_ids, "
            "and cache_salt",
            "prompt",
        )
    salt = given.pop("cache_salt", "")
    if not isinstance(salt, str):
        raise InvalidParameterError(f"cache_salt is {salt!r:.80}; it must be text", "cache_salt")
    if not given:
        raise InvalidParameterError("a prompt must have prompt or prompt_token_ids", "prompt")
    return GivenPrompt(given.get("prompt"), given.get("prompt_token_ids"), salt)
