"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dist_aclgraph.serve.body import read_body
from dist_aclgraph.serve.generation import Generation, Pieces
from dist_aclgraph.serve.logprobs import chat_logprobs
from dist_aclgraph.serve.openai_types import ChatRequest
from dist_aclgraph.serve.reply import Reply, gather, reply
from dist_aclgraph.serve.state import ApiState


async def chat_completions(state: ApiState, request: Request) -> Response:
    def convert(body: ChatRequest) -> tuple[ChatRequest, list[dict[str, str]]]:
        state.admit(body.model)
        return body, body.for_template()

    body, messages = await read_body(request, ChatRequest, convert, state.config.serve)
    # Off the event loop: a long prompt must not stall the streams of others.
    prompt_ids = await asyncio.to_thread(
        state.tokenizer.encode_chat, messages, max_tokens=state.context_len
    )
    params = body.sampling(state.fit(len(prompt_ids), body.asked_max_tokens, None, "messages"))
    generation = Generation(state, [prompt_ids], [params], body.num_choices, body.cache_salt or "")
    return await reply(request, generation, _ChatReply(state, body), stream=bool(body.stream))


class _ChatReply(Reply):
    """Shapes pieces into chat completion objects."""

    def __init__(self, state: ApiState, body: ChatRequest) -> None:
        super().__init__(state, "chatcmpl")
        self._body = body
        self._streaming = body.streaming()

    async def chunks(self, generation: Generation, pieces: Pieces) -> AsyncIterator[dict[str, Any]]:
        begun: set[int] = set()
        async for piece in pieces:
            if piece.index not in begun:
                begun.add(piece.index)
                delta = {"role": "assistant", "content": ""}
                yield self._chunk(generation, self._choice(piece.index, delta, None, None))
            delta = {"content": piece.text} if piece.text else {}
            logprobs = chat_logprobs(self.state.tokenizer, piece.logprobs)
            choice = self._choice(
                piece.index, delta, logprobs if piece.logprobs else None, piece.finish_reason
            )
            yield self._chunk(generation, choice)
        if self._streaming.include_usage:
            yield {**self._chunk(generation), "usage": generation.usage.as_json()}

    async def whole(self, generation: Generation, pieces: Pieces) -> dict[str, Any]:
        choices = []
        for merged in await gather(pieces):
            logprobs = chat_logprobs(self.state.tokenizer, merged.logprobs)
            choices.append(
                {
                    "index": merged.index,
                    "message": {"role": "assistant", "content": merged.text, "refusal": None},
                    "logprobs": logprobs if self._body.logprobs else None,
                    "finish_reason": merged.finish_reason,
                }
            )
        usage = generation.usage.as_json()
        return {**self.head("chat.completion"), "choices": choices, "usage": usage}

    def _chunk(self, generation: Generation, *choices: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self.head("chat.completion.chunk"), "choices": list(choices)}
        if self._streaming.include_usage:
            so_far = self._streaming.continuous_usage_stats
            chunk["usage"] = generation.usage.as_json() if so_far else None
        return chunk

    @staticmethod
    def _choice(
        index: int, delta: dict[str, str], logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
