"""Prompts and arguments that ``LLM`` takes from its user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from dist_aclgraph.errors import InvalidParameterError

Prompt = str | Sequence[int] | Mapping[str, Any]
# Arguments of vLLM that must be None, and why.
ABSENT = {
    "lora_request": "LoRA is not offered: merge the weights into the checkpoint",
    "pooling_params": "the checkpoint tells how its states are pooled; embed has dimensions",
}


def check_absent(**given: object) -> None:
    """Refuse arguments of ``ABSENT`` that have a value."""
    for name, value in given.items():
        if value is not None:
            raise InvalidParameterError(f"{name} is given, but {ABSENT[name]}", name)


def listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return a list of prompts, even for a single prompt."""
    is_one = isinstance(prompts, str | Mapping) or (
        len(prompts) > 0 and all(isinstance(item, int) for item in prompts)
    )
    return cast(Sequence[Prompt], [prompts] if is_one else prompts)


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
