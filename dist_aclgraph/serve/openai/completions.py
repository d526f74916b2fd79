"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dist_aclgraph.errors import InvalidParameterError, RequestTooLongError
from dist_aclgraph.serve.observe.request_account import ACCOUNT
from dist_aclgraph.serve.openai.body import note_ignored, read_body
from dist_aclgraph.serve.openai.errors import json_response, prompt_in
from dist_aclgraph.serve.openai.generation import ChoicePiece, Generation, Usage
from dist_aclgraph.serve.openai.kv_transfer import check_transfer, transfer_of
from dist_aclgraph.serve.openai.logprobs import completion_logprobs, prompt_logprobs, rows_of
from dist_aclgraph.serve.openai.reply import Reply, joined, reply
from dist_aclgraph.serve.openai.sampling_fields import ends_without_effect
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.openai.structured import field_of_form
from dist_aclgraph.serve.openai.types import CompletionRequest
from dist_aclgraph.serve.resume.journal import Chance
from dist_aclgraph.steps.step import RowLogprobs
from dist_aclgraph.text.detokenizer import token_texts
from dist_aclgraph.text.infill import infill_prompt

DEFAULT_MAX_TOKENS = 16


async def completions(state: ApiState, request: Request) -> Response:
    """Continue one or more prompts; with ``stream``, by server-sent events."""

    def convert(body: CompletionRequest) -> tuple[CompletionRequest, list[Any]]:
        state.admit(body.model)
        return body, body.prompts(state.context_len)

    body, given = await read_body(request, CompletionRequest, convert, state.config.serve)
    # Encode on a thread, because a long text must not delay the streams of other requests.
    is_text = isinstance(given[0], str)
    if body.suffix:
        given = [infill_prompt(state.tokenizer, text, body.suffix) for text in given]
    most = body.most_prompt_tokens(state.context_len)
    prompts = (
        await asyncio.to_thread(encode_prompts, state, given, most)
        if is_text
        else encode_prompts(state, given, most)
    )
    if body.truncate_prompt_tokens is not None:  # an echo contains the truncated prompt
        given = prompts = [body.truncated(ids, state.context_len) for ids in prompts]
    if body.asked_max_tokens == 0 and body.echo and body.asked_prompt_logprobs is None:
        shape = _CompletionReply(state, body, given, prompts, Chance.draw(seed=0))
        return _echo_alone(state, body, shape, prompts)
    state.check_prompt_logprobs(
        body.asked_prompt_logprobs, prompts, body.num_choices, body.name_of_prompt_logprobs
    )
    transfer = body.transfer(len(prompts))
    peer = check_transfer(state, transfer)
    # The engine generates at least one token. If ``max_tokens`` is 0, the answer omits this token.
    max_tokens = 1 if body.asked_max_tokens == 0 and body.echo else body.asked_max_tokens
    usual = None if body.is_unlimited else DEFAULT_MAX_TOKENS
    params = [
        body.sampling(
            state.fit(len(ids), max_tokens, usual, "prompt"),
            state.sampling_defaults,
        )
        for ids in prompts
    ]
    params = await state.params_with_token_ids(
        params, salt=body.cache_salt or "", param=field_of_form(body)
    )
    ignored = ends_without_effect(params[0])
    if params[0].thinking_tokens is not None:  # completions have no reasoning
        ignored.append(body.name_of_budget)
    note_ignored(request.scope, ignored)
    journal = state.open_journal(request.scope)
    generation = Generation(
        state,
        prompts,
        params,
        body.num_choices,
        body.cache_salt or "",
        journal,
        account=request.scope.get(ACCOUNT),
        role=transfer.role,
        peer=peer,
    )
    shape = _CompletionReply(state, body, given, prompts, journal.chance)
    return await reply(request, generation, shape, stream=bool(body.stream))


def encode_prompts(
    state: ApiState, given: Sequence[str | list[int]], most: int, param: str = "prompt"
) -> list[list[int]]:
    """Return the token ids of prompts.

    Args:
        most: maximum number of tokens of one prompt.
        param: the field that contains the prompts; used in error messages.

    Raises:
        InvalidParameterError: a prompt is empty, or contains a token id that is not in the model.
        RequestTooLongError: the number of tokens of a prompt exceeds ``most``.
    """
    encoded = []
    for prompt in given:
        if isinstance(prompt, str):
            with prompt_in(param):
                ids = state.tokenizer.encode(prompt, max_tokens=most)
        else:
            state.tokenizer.check_ids(prompt, param)
            ids = prompt
        if not ids:
            raise InvalidParameterError(f"{param} must not be empty", param)
        encoded.append(ids)
    return encoded


def _echo_alone(
    state: ApiState, body: CompletionRequest, shape: _CompletionReply, prompts: list[list[int]]
) -> Response:
    """Return only the prompt and its token count, for ``max_tokens=0`` with ``echo``."""
    if body.stream:
        raise InvalidParameterError("max_tokens 0 cannot be streamed", "max_tokens")
    longest = max(len(ids) for ids in prompts)
    if longest > state.context_len:
        raise RequestTooLongError(
            f"This model's maximum context length is {state.context_len} tokens; "
            f"the prompt has {longest}",
            "prompt",
        )
    count = len(prompts) * body.num_choices
    choices = [
        {"index": i, "text": shape.echo(i), "logprobs": None, "finish_reason": "length"}
        for i in range(count)
    ]
    usage = Usage(prompt_tokens=sum(len(ids) for ids in prompts)).as_json()
    return json_response(shape.body(choices, usage))


class _CompletionReply(Reply):
    """Converts pieces of the answer to text completion objects.

    Args:
        given: the prompts as the client sent them.
        prompts: the prompts' token ids.
    """

    def __init__(
        self,
        state: ApiState,
        body: CompletionRequest,
        given: Sequence[str | list[int]],
        prompts: Sequence[list[int]],
        chance: Chance,
    ) -> None:
        kind = "text_completion", "text_completion"
        super().__init__(state, "cmpl", kind, body.streaming(), chance)
        self._body = body
        self._given = given
        self._prompts = prompts
        # For each choice, the number of characters in its token texts so far.
        self._lengths: dict[int, int] = {}

    def echo(self, index: int) -> str:
        prompt = self._given[index // self._body.num_choices]
        return prompt if isinstance(prompt, str) else self.state.tokenizer.decode(prompt)

    def _prompt_texts(self, index: int) -> list[str]:
        """Return the text of each token of a choice's prompt."""
        number = index // self._body.num_choices
        given = self._given[number]
        return token_texts(
            self.state.tokenizer, self._prompts[number], given if isinstance(given, str) else None
        )

    def frames(self, usage: Usage | None, piece: ChoicePiece) -> bytes:
        is_first = piece.index not in self._lengths
        offset = self._lengths.get(piece.index, 0)
        choice = self._choice(piece, offset, is_first=is_first)
        # The offset is the number of characters in all sent tokens. The sent text may have another
        # length, because a token and its text may be in different pieces.
        tokens = choice["logprobs"]["tokens"] if choice["logprobs"] else ()
        self._lengths[piece.index] = offset + sum(map(len, tokens))
        return self.chunk(usage, choice)

    def whole(self, generation: Generation, pieces: list[list[ChoicePiece]]) -> dict[str, Any]:
        choices = [self._choice(piece, 0, is_first=True) for piece in map(joined, pieces)]
        return self.body(choices, generation.usage.as_json()) | transfer_of(generation, choices)

    def _choice(self, piece: ChoicePiece, offset: int, *, is_first: bool) -> dict[str, Any]:
        """Return a choice object.

        Args:
            offset: number of characters in the token texts of the choice before this piece.
        """
        has_logprobs, shows_prompt = self._body.logprobs is not None, is_first and self._body.echo
        prompt_texts = self._prompt_texts(piece.index) if shows_prompt and has_logprobs else []
        echo = "".join(prompt_texts)
        if shows_prompt and not has_logprobs:
            echo = self.echo(piece.index)
        is_left_out = self._body.asked_max_tokens == 0
        choice = {
            "index": piece.index,
            "text": echo if is_left_out else echo + piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        rows: list[RowLogprobs | None] = [] if is_left_out else [*piece.logprobs]
        texts = [] if is_left_out else [*piece.token_texts]
        if self._body.return_token_ids:
            choice["token_ids"] = [] if is_left_out else piece.token_ids
            if is_first:
                choice["prompt_token_ids"] = self._prompts[piece.index // self._body.num_choices]
        if self._body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = prompt_logprobs(self.state.tokenizer, piece.prompt_logprobs)
        if not has_logprobs:
            return choice
        if shows_prompt:
            rows = [None, *rows_of(piece.prompt_logprobs), *rows]
            texts = prompt_texts + texts
        choice["logprobs"] = completion_logprobs(self.state.tokenizer, rows, texts, offset)
        return choice
