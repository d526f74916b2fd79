"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dist_aclgraph.errors import InvalidParameterError, RequestTooLongError
from dist_aclgraph.serve.body import read_body
from dist_aclgraph.serve.errors import json_response
from dist_aclgraph.serve.generation import ChoicePiece, Generation, Pieces, Usage
from dist_aclgraph.serve.logprobs import completion_logprobs
from dist_aclgraph.serve.openai_types import CompletionRequest
from dist_aclgraph.serve.reply import Reply, gather, reply
from dist_aclgraph.serve.state import ApiState

DEFAULT_MAX_TOKENS = 16


async def completions(state: ApiState, request: Request) -> Response:
    def convert(body: CompletionRequest) -> tuple[CompletionRequest, list[Any]]:
        state.admit(body.model)
        return body, body.prompts(state.context_len)

    body, given = await read_body(request, CompletionRequest, convert, state.config.serve)
    # Off the event loop: a long text must not stall the streams of others.
    is_text = isinstance(given[0], str)
    prompts = await asyncio.to_thread(_encode, state, given) if is_text else _encode(state, given)
    shape = _CompletionReply(state, body, given)
    if body.max_tokens == 0 and body.echo:
        return _echo_alone(state, body, shape, prompts)
    params = [
        body.sampling(state.fit(len(ids), body.max_tokens, DEFAULT_MAX_TOKENS, "prompt"))
        for ids in prompts
    ]
    generation = Generation(state, prompts, params, body.num_choices)
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
    return json_response({**shape.head("text_completion"), "choices": choices, "usage": usage})


class _CompletionReply(Reply):
    """Shapes pieces into text completion objects."""

    def __init__(
        self, state: ApiState, body: CompletionRequest, prompts: Sequence[str | list[int]]
    ) -> None:
        super().__init__(state, "cmpl")
        self._body = body
        self._prompts = prompts
        self._streaming = body.streaming()

    def echo(self, index: int) -> str:
        if not self._body.echo:
            return ""
        prompt = self._prompts[index // self._body.num_choices]
        return prompt if isinstance(prompt, str) else self.state.tokenizer.decode(prompt)

    async def chunks(self, generation: Generation, pieces: Pieces) -> AsyncIterator[dict[str, Any]]:
        lengths: dict[int, int] = {}
        async for piece in pieces:
            text = piece.text
            if piece.index not in lengths:
                text = self.echo(piece.index) + text
            offset = lengths.get(piece.index, 0)
            lengths[piece.index] = offset + len(text)
            yield {**self._chunk(generation), "choices": [self._choice(piece, text, offset)]}
        if self._streaming.include_usage:
            yield {**self._chunk(generation), "choices": [], "usage": generation.usage.as_json()}

    async def whole(self, generation: Generation, pieces: Pieces) -> dict[str, Any]:
        choices = []
        for merged in await gather(pieces):
            echo = self.echo(merged.index)
            choices.append(self._choice(merged, echo + merged.text, len(echo)))
        usage = generation.usage.as_json()
        return {**self.head("text_completion"), "choices": choices, "usage": usage}

    def _choice(self, piece: ChoicePiece, text: str, offset: int) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = completion_logprobs(self.state.tokenizer, piece.logprobs, offset)
        return {
            "index": piece.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }

    def _chunk(self, generation: Generation) -> dict[str, Any]:
        chunk = self.head("text_completion")
        if self._streaming.include_usage:
            so_far = self._streaming.continuous_usage_stats
            chunk["usage"] = generation.usage.as_json() if so_far else None
        return chunk
