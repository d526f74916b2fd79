"""Reads the fields for chat templates, and fields of several APIs that control the reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import Raw

from dist_aclgraph.serve.openai.body import Body, decode, is_empty
from dist_aclgraph.serve.openai.counted import check_num_strings
from dist_aclgraph.serve.openai.schemas import MAX_PARTS
from dist_aclgraph.serve.openai.text_parts import reasoning_variables, thinking_variables
from dist_aclgraph.text.chat_template import ChatOptions

MAX_VARIABLES = 1024  # maximum number of strings in ``chat_template_kwargs``, names included
_NOTHING = (b"", b"null")


class ThinkingSwitch(Body):
    """``thinking``: turns reasoning on or off. With the type auto or adaptive, the model decides
    whether it reasons.

    The APIs of Anthropic, DeepSeek and GLM have this field.
    """

    type: str
    budget_tokens: int | None = None


class ReasoningSwitch(Body):
    """The request field ``reasoning``. It has the same subfields as in OpenRouter's API."""

    effort: str | None = None
    enabled: bool | None = None
    max_tokens: int | None = None


class HasTemplateFields(Protocol):
    """Base class of bodies that have the fields for chat templates and for the reasoning."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: Raw
    documents: Raw
    reasoning_effort: str | None
    enable_thinking: bool | None
    thinking: Raw
    reasoning: Raw

    def kind_of_part(self, kind: type[Any]) -> type[Any]: ...


@dataclass(frozen=True)
class AskedReasoning:
    """The changes of the reasoning that a chat request asks for.

    Attributes:
        is_on: true if the request turns the reasoning on, false if the request turns the reasoning
            off; None if the request does neither.
        budget: the limit of tokens in ``thinking`` or ``reasoning``; None if there is no limit.
        effort_param, budget_param: names of the fields that contain the effort and the limit, for
            error messages.
    """

    is_on: bool | None = None
    effort: str | None = None
    effort_param: str = "reasoning_effort"
    budget: int | None = None
    budget_param: str = ""

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the chat template."""
        own = {} if self.is_on is None else thinking_variables(is_on=self.is_on)
        return reasoning_variables(self.effort) | own


def asked_reasoning(body: HasTemplateFields) -> AskedReasoning:
    """Read from a body's fields how the request changes the reasoning.

    ``enable_thinking`` and ``reasoning_effort`` have priority over ``thinking``, which has priority
    over ``reasoning``.
    """
    is_on, effort, param = body.enable_thinking, body.reasoning_effort, "reasoning_effort"
    budget, budget_param = None, ""
    thinking = _thinking(body)
    if isinstance(thinking, bool):
        is_on = thinking if is_on is None else is_on
    elif thinking is not None:
        switched = {"enabled": True, "disabled": False}.get(thinking.type)
        is_on = switched if is_on is None else is_on
        budget, budget_param = thinking.budget_tokens, "thinking.budget_tokens"
    if bytes(body.reasoning) not in _NOTHING:
        kind = body.kind_of_part(ReasoningSwitch)
        found: ReasoningSwitch = decode(body.reasoning, kind, "reasoning")
        is_on = found.enabled if is_on is None else is_on
        if effort is None:
            effort, param = found.effort, "reasoning.effort"
        if budget is None:
            budget, budget_param = found.max_tokens, "reasoning.max_tokens"
    return AskedReasoning(is_on, effort, param, budget, budget_param)


def _thinking(body: HasTemplateFields) -> ThinkingSwitch | bool | None:
    if not bytes(body.thinking):
        return None
    kind = body.kind_of_part(ThinkingSwitch)
    found: ThinkingSwitch | bool | None = decode(body.thinking, bool | kind | None, "thinking")
    return found


def make_chat_options(
    body: HasTemplateFields, asked: AskedReasoning, *, continues: bool
) -> ChatOptions:
    """Return the options for making a prompt from the messages.

    Args:
        continues: whether the last message has a field that requests its continuation.
    """
    begins, continues = body.add_generation_prompt, bool(body.continue_final_message) or continues
    return ChatOptions(
        documents=_documents(body.documents),
        # The default of add_generation_prompt is the opposite of continue_final_message.
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
        template=body.chat_template,
        variables=asked.variables | read_variables(body.chat_template_kwargs),
    )


def read_variables(raw: Raw) -> dict[str, Any]:
    """Return the variables of ``chat_template_kwargs``."""
    if is_empty(raw, b"{}"):
        return {}
    check_num_strings(bytes(raw), MAX_VARIABLES, "chat_template_kwargs")
    found: dict[str, Any] = decode(raw, dict[str, Any], "chat_template_kwargs")
    return found


def _documents(raw: Raw) -> list[dict[str, Any]] | None:
    if is_empty(raw, b"[]"):
        return None
    check_num_strings(bytes(raw), 4 * MAX_PARTS, "documents")
    found: list[dict[str, Any]] = decode(raw, list[dict[str, Any]], "documents")
    return found
