"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dist_aclgraph.serve.openai.body import read_body
from dist_aclgraph.serve.openai.generation import ChoicePiece, Generation, Usage
from dist_aclgraph.serve.openai.logprobs import chat_logprobs, prompt_logprobs
from dist_aclgraph.serve.openai.reply import Reply, reply
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.openai.types import ChatRequest
from dist_aclgraph.serve.resume.journal import Chance
from dist_aclgraph.text.chat_template import ChatOptions


async def chat_completions(state: ApiState, request: Request) -> Response:
    """Answer messages; with ``stream``, by server-sent events."""

    def convert(body: ChatRequest) -> tuple[ChatRequest, list[dict[str, str | None]], ChatOptions]:
        state.admit(body.model)
        return body, body.for_template(), body.chat_options()

    body, messages, options = await read_body(request, ChatRequest, convert, state.config.serve)
    # Not on the event loop, because a long prompt must not delay the streams of other requests.
    prompt_ids = await asyncio.to_thread(
        state.tokenizer.encode_chat,
        messages,
        options,
        max_tokens=body.most_prompt_tokens(state.context_len),
    )
    prompt_ids = body.truncated(prompt_ids, state.context_len)
    state.check_prompt_logprobs(body.prompt_logprobs, [prompt_ids], body.num_choices)
    defaults = state.sampling_defaults
    most = defaults.get("max_tokens")
    max_tokens = state.fit(len(prompt_ids), body.asked_max_tokens, most, "messages")
    params = await state.params_with_token_ids([body.sampling(max_tokens, defaults)])
    journal = state.open_journal(request.scope)
    generation = Generation(
        state, [prompt_ids], params, body.num_choices, body.cache_salt or "", journal
    )
    shape = _ChatReply(state, body, prompt_ids, journal.chance)
    return await reply(request, generation, shape, stream=bool(body.stream))


class _ChatReply(Reply):
    """Shapes pieces into chat completion objects."""

    def __init__(
        self, state: ApiState, body: ChatRequest, prompt_ids: list[int], chance: Chance
    ) -> None:
        kind = "chat.completion", "chat.completion.chunk"
        super().__init__(state, "chatcmpl", kind, body.streaming(), chance)
        self._body = body
        self._prompt_ids = prompt_ids
        self._begun: set[int] = set()

    def frames(self, usage: Usage | None, piece: ChoicePiece) -> bytes:
        delta = {"content": piece.text} if piece.text else {}
        has_more = len(piece.logprobs) > piece.has_end_token
        logprobs = self._logprobs(piece) if has_more else None
        choice = self._choice(piece.index, delta, logprobs, piece.finish_reason)
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
        frame = self.chunk(usage, choice)
        if piece.index in self._begun:
            return frame
        self._begun.add(piece.index)
        first = {"role": "assistant", "content": ""}
        choice = self._choice(piece.index, first, None, None)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = self._prompt_ids
        return self.chunk(usage, choice) + frame

    def whole(self, generation: Generation, pieces: list[ChoicePiece]) -> dict[str, Any]:
        choices = []
        for piece in pieces:
            choices.append(
                {
                    "index": piece.index,
                    "message": {"role": "assistant", "content": piece.text, "refusal": None},
                    "logprobs": self._logprobs(piece) if self._body.logprobs else None,
                    "finish_reason": piece.finish_reason,
                }
            )
            if self._body.return_token_ids:
                choices[-1]["token_ids"] = piece.token_ids
        reply = self.body(choices, generation.usage.as_json())
        if self._body.prompt_logprobs is not None:
            parts = pieces[0].prompt_logprobs
            reply["prompt_logprobs"] = prompt_logprobs(self.state.tokenizer, parts)
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = self._prompt_ids
        return reply

    def _logprobs(self, piece: ChoicePiece) -> dict[str, Any]:
        num_shown = len(piece.logprobs) - piece.has_end_token
        rows, texts = piece.logprobs[:num_shown], piece.token_texts[:num_shown]
        return chat_logprobs(self.state.tokenizer, rows, texts)

    @staticmethod
    def _choice(
        index: int, delta: dict[str, str], logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
