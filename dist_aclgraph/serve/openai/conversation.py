"""Makes a ``Generation`` from the messages of a conversation, for all APIs that have messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.types import Scope

from dist_aclgraph.errors import InvalidParameterError, UnusableToolError
from dist_aclgraph.formats.scanner import Reader
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.serve.observe.request_account import ACCOUNT
from dist_aclgraph.serve.openai.body import note_ignored
from dist_aclgraph.serve.openai.errors import prompt_in
from dist_aclgraph.serve.openai.generation import Generation
from dist_aclgraph.serve.openai.kv_transfer import NO_TRANSFER, Transfer, check_transfer
from dist_aclgraph.serve.openai.sampling_fields import ends_without_effect
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.openai.tools import ToolUse
from dist_aclgraph.serve.resume.journal import Chance
from dist_aclgraph.text.chat_template import ChatOptions
from dist_aclgraph.text.structure import Thinking

# The last tokens of a prompt show whether the prompt has opened the reasoning. If the answer
# continues a message, all tokens from the reasoning's begin marker to the end of the prompt are
# read.
TAIL_TOKENS = 64


def _all_of(ids: list[int]) -> list[int]:
    return ids


@dataclass(frozen=True)
class Conversation:
    """The content of a chat request.

    Attributes:
        messages: the messages, in the form that chat templates need.
        params: sampling parameters; ``max_tokens`` is None if the request gives no limit.
        is_unlimited: if true, only the context limits the length of the answer. If false, the
            model's recommended maximum is another limit.
        options: the options for making the prompt from the messages, and the definitions of
            ``tools``.
        tools: the tools that the answer may call; None if it may not call tools.
        is_limit_soft: whether the service may reduce ``max_tokens`` to the remaining context, and
            may ignore the limit of reasoning. True for APIs that require ``max_tokens`` and the
            limit of reasoning.
        form_param: the request's field for the output format; used in error messages.
        limit_param: the request's field for messages; used in error messages about the length of
            the prompt.
        budget_param: the request's field for the limit of reasoning.
        is_budget_soft: whether the limit of reasoning is ignored if the model's format does not
            support such a limit. If false, the request is refused.
        ignored: fields of the request that have no effect.
        off_param: the request's field that turns the reasoning off; empty if no field turns it off.
        most_prompt_tokens: maximum number of tokens of the prompt before truncation; None means the
            context length.
        truncated: a function that truncates the prompt.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    options: ChatOptions
    tools: ToolUse | None = None
    num_choices: int = 1
    cache_salt: str = ""
    is_unlimited: bool = False
    is_limit_soft: bool = False
    form_param: str = "response_format"
    limit_param: str = "messages"
    budget_param: str = "thinking_tokens"
    is_budget_soft: bool = False
    ignored: Sequence[str] = ()
    off_param: str = ""
    most_prompt_tokens: int | None = None
    truncated: Callable[[list[int]], list[int]] = _all_of
    transfer: Transfer = NO_TRANSFER


@dataclass(frozen=True)
class OpenConversation:
    """A conversation that is ready for the generation of its next message.

    Attributes:
        chance: the answer's random values, such as its id.
    """

    prompt_ids: list[int]
    generation: Generation
    chance: Chance


async def encode(state: ApiState, asked: Conversation) -> list[int]:
    """Return the prompt of a conversation.

    Raises:
        InvalidParameterError: the template refuses the messages.
        RequestTooLongError: the prompt is too long.
    """
    options = asked.options
    if asked.tools is not None:
        options = replace(options, tools=asked.tools.definitions)
    # Encode on a thread, because a long prompt must not delay the streams of other requests.
    with prompt_in(asked.limit_param):
        ids = await asyncio.to_thread(
            state.tokenizer.encode_chat,
            asked.messages,
            options,
            max_tokens=asked.most_prompt_tokens or state.context_len,
        )
    return asked.truncated(ids)


async def open_conversation(state: ApiState, scope: Scope, asked: Conversation) -> OpenConversation:
    """Prepare the next message of a conversation, without submitting a request.

    Raises:
        InvalidParameterError: the request is wrong.
        RequestTooLongError: the prompt and the answer together exceed the context.
    """
    peer = check_transfer(state, asked.transfer)
    tools, answers = asked.tools, state.answers
    if tools is not None and answers.name is None:
        raise InvalidParameterError(
            "tools: the chat template of this model has no known format of calls; name one by "
            "serve.tool_format",
            "tools",
        )
    prompt_ids = await encode(state, asked)
    state.check_prompt_logprobs(asked.params.prompt_logprobs, [prompt_ids], asked.num_choices)
    most = None if asked.is_unlimited else state.sampling_defaults.get("max_tokens")
    wanted = asked.params.max_tokens
    if asked.is_limit_soft:
        wanted, most = None, wanted or most
    max_tokens = state.fit(len(prompt_ids), wanted, most, asked.limit_param)
    if answers.has_channels:
        _check_reasoning(asked, answers.name)
    thinking = _find_thinking(state, prompt_ids, asked.options)
    params = await _with_form(state, asked, replace(asked.params, max_tokens=max_tokens), thinking)
    note_ignored(scope, [*asked.ignored, *_without_effect(asked, params, thinking)])
    journal = state.open_journal(scope)
    generation = Generation(
        state,
        [prompt_ids],
        [params],
        asked.num_choices,
        asked.cache_salt,
        journal,
        make_reader=_make_readers(
            state, tools, thinking, has_form=params.structured_outputs is not None
        ),
        max_calls=None if tools is None else tools.max_calls,
        account=scope.get(ACCOUNT),
        role=asked.transfer.role,
        peer=peer,
    )
    return OpenConversation(prompt_ids, generation, journal.chance)


def _check_reasoning(asked: Conversation, name: str | None) -> None:
    """Raise an error if a request limits or disables the reasoning. The format ``name`` supports
    neither.
    """
    is_soft = asked.is_limit_soft or asked.is_budget_soft
    if asked.params.thinking_tokens is not None and not is_soft:
        raise InvalidParameterError(
            f"{asked.budget_param}: the reasoning of the format {name} has no limit of tokens; set "
            "reasoning_effort",
            asked.budget_param,
        )
    if asked.off_param:
        raise InvalidParameterError(
            f"{asked.off_param} is none: the reasoning of the format {name} cannot be turned off; "
            "low is the least effort",
            asked.off_param,
        )


def _without_effect(
    asked: Conversation, params: SamplingParams, thinking: Thinking | None
) -> list[str]:
    """Return the fields of a request that have no effect on its answer."""
    has_no_limit = params.thinking_tokens is not None and thinking is None
    return [asked.budget_param] * has_no_limit + ends_without_effect(params)


async def _with_form(
    state: ApiState, asked: Conversation, params: SamplingParams, thinking: Thinking | None
) -> SamplingParams:
    """Return parameters with the grammar of the answer.

    Required calls follow the schemas of the tools. If the schema of a tool cannot be used, and the
    tool is not strict, the tool's arguments may be any object. If the grammar as a whole cannot be
    used, for example because it is too large, the arguments of all tools that are not strict may be
    any object.

    Raises:
        InvalidParameterError: the output format, or a strict tool's schema, cannot be used.
    """
    tools = asked.tools
    param = "tools" if params.structured_outputs is None else asked.form_param

    async def compiled(checked: frozenset[str]) -> SamplingParams:
        form = state.answers.structured(
            params.structured_outputs,
            None if tools is None else tools.schemas,
            checked,
            is_required=tools is not None and tools.mode == "required",
            is_parallel=tools is None or tools.max_calls is None,
        )
        wanted = replace(params, structured_outputs=form)
        (found,) = await state.params_with_token_ids(
            [wanted],
            thinking,
            salt=asked.cache_salt,
            param=asked.budget_param if form is None else param,
        )
        return found

    strict = frozenset() if tools is None else tools.strict
    checked = strict
    if tools is not None and tools.mode == "required":
        checked = frozenset(tools.schemas)
    while True:
        try:
            return await compiled(checked)
        except InvalidParameterError as e:
            unusable = e.tools if isinstance(e, UnusableToolError) else checked
            kept = checked.difference(unusable) | strict
            if kept == checked:
                raise
            checked = kept


def _find_thinking(state: ApiState, prompt_ids: list[int], options: ChatOptions) -> Thinking | None:
    answers, continues = state.answers, options.continue_final_message
    if answers.thought is None:
        return None
    tail = state.tokenizer.text_of(prompt_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    markers = answers.thought.begin, answers.thought.end
    begin, end = (answers.token_ids.get(marker, -1) for marker in markers)
    found = Thinking(begin, end, answers.is_thinking(tail, continues=continues))
    if begin >= 0:
        found = replace(found, is_open=_has_opened(state, prompt_ids, found, continues=continues))
    # If the prompt ends with the reasoning's end marker, the template has turned the reasoning off.
    is_off = tail.rstrip().endswith(answers.thought.end)
    return replace(found, begin=-1) if is_off else found


def _has_opened(state: ApiState, ids: list[int], thinking: Thinking, *, continues: bool) -> bool:
    """Return whether a prompt has opened the reasoning of the answer. The marker that begins the
    reasoning is one token. If other tokens contain the marker's characters, these tokens are
    ordinary text.
    """
    assert state.answers.thought is not None
    ids = ids if continues else ids[-TAIL_TOKENS:]
    if thinking.begin not in ids:
        return False
    rest = ids[len(ids) - ids[::-1].index(thinking.begin) :]
    if thinking.end in rest or not set(state.tokenizer.eos_ids).isdisjoint(rest):
        return False  # the reasoning, or the message that contains it, has ended
    text = state.tokenizer.text_of(rest, skip_special_tokens=False)
    has_ended = thinking.end < 0 and state.answers.thought.end in text
    return not has_ended and (continues or not text.strip())


def _make_readers(
    state: ApiState, tools: ToolUse | None, thinking: Thinking | None, *, has_form: bool
) -> Callable[[], Reader | None]:
    return partial(
        state.answers.reader,
        None if tools is None else tools.schemas,
        is_thinking=thinking is not None and thinking.is_open,
        has_form=has_form,
    )
