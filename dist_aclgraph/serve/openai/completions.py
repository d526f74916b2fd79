"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dist_aclgraph.errors import InvalidParameterError, RequestTooLongError
from dist_aclgraph.serve.openai.body import read_body, receive_body
from dist_aclgraph.serve.openai.errors import json_response
from dist_aclgraph.serve.openai.generation import ChoicePiece, Generation, Usage
from dist_aclgraph.serve.openai.logprobs import completion_logprobs
from dist_aclgraph.serve.openai.reply import Reply, reply
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.openai.types import CompletionRequest
from dist_aclgraph.serve.resume.journal import Chance

DEFAULT_MAX_TOKENS = 16


async def completions(state: ApiState, request: Request) -> Response:
    """Continue one or more prompts; with ``stream``, by server-sent events."""

    def convert(body: CompletionRequest) -> tuple[CompletionRequest, list[Any]]:
        state.admit(body.model)
        return body, body.prompts(state.context_len)

    data = await receive_body(request, state.config.serve)
    body, given = await read_body(data, CompletionRequest, convert, state.config.serve)
    # Off the event loop: a long text must not stall the streams of others.
    is_text = isinstance(given[0], str)
    prompts = await asyncio.to_thread(_encode, state, given) if is_text else _encode(state, given)
    if body.max_tokens == 0 and body.echo:
        shape = _CompletionReply(state, body, given, Chance.draw(seed=0))
        return _echo_alone(state, body, shape, prompts)
    params = [
        body.sampling(
            state.fit(len(ids), body.max_tokens, DEFAULT_MAX_TOKENS, "prompt"),
            state.sampling_defaults,
        )
        for ids in prompts
    ]
    journal = state.open_journal(request.scope)
    generation = Generation(
        state, prompts, params, body.num_choices, body.cache_salt or "", journal
    )
    shape = _CompletionReply(state, body, given, journal.chance)
    return await reply(request, generation, shape, stream=bool(body.stream))


def _encode(state: ApiState, given: Sequence[str | list[int]]) -> list[list[int]]:
    encoded = []
    for prompt in given:
        if isinstance(prompt, str):
            ids = state.tokenizer.encode(prompt, max_tokens=state.context_len)
        else:
            state.tokenizer.check_ids(prompt, "prompt")
            ids = prompt
        if not ids:
            raise InvalidParameterError("prompt must not be empty", "prompt")
        encoded.append(ids)
    return encoded


def _echo_alone(
    state: ApiState, body: CompletionRequest, shape: _CompletionReply, prompts: list[list[int]]
) -> Response:
    """``max_tokens=0`` with ``echo`` asks for the prompt and its token count alone."""
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
    """Shapes pieces into text completion objects."""

    def __init__(
        self,
        state: ApiState,
        body: CompletionRequest,
        prompts: Sequence[str | list[int]],
        chance: Chance,
    ) -> None:
        kind = "text_completion", "text_completion"
        super().__init__(state, "cmpl", kind, body.streaming(), chance)
        self._body = body
        self._prompts = prompts
        self._lengths: dict[int, int] = {}  # of the text so far, by choice

    def echo(self, index: int) -> str:
        if not self._body.echo:
            return ""
        prompt = self._prompts[index // self._body.num_choices]
        return prompt if isinstance(prompt, str) else self.state.tokenizer.decode(prompt)

    def frames(self, generation: Generation, piece: ChoicePiece) -> bytes:
        text = piece.text
        if piece.index not in self._lengths:
            text = self.echo(piece.index) + text
        offset = self._lengths.get(piece.index, 0)
        self._lengths[piece.index] = offset + len(text)
        return self.chunk(generation, self._choice(piece, text, offset))

    def whole(self, generation: Generation, pieces: list[ChoicePiece]) -> dict[str, Any]:
        choices = []
        for piece in pieces:
            echo = self.echo(piece.index)
            choices.append(self._choice(piece, echo + piece.text, len(echo)))
        return self.body(choices, generation.usage.as_json())

    def _choice(self, piece: ChoicePiece, text: str, offset: int) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = completion_logprobs(
                self.state.tokenizer, piece.logprobs, piece.token_texts, offset
            )
        return {
            "index": piece.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }
