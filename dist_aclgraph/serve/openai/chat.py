"""POST /v1/chat/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dist_aclgraph.formats.events import CallBegin, Event
from dist_aclgraph.serve.openai.body import read_body
from dist_aclgraph.serve.openai.chat_deltas import WholeCalls, delta_of, message_of
from dist_aclgraph.serve.openai.conversation import Conversation, open_conversation
from dist_aclgraph.serve.openai.generation import ChoicePiece, Generation, Usage
from dist_aclgraph.serve.openai.kv_transfer import transfer_of
from dist_aclgraph.serve.openai.logprobs import chat_logprobs, prompt_logprobs
from dist_aclgraph.serve.openai.reply import Reply, joined, reply
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.openai.types import ChatRequest
from dist_aclgraph.serve.resume.journal import Chance

# Mistral's clients refuse pieces of calls: each delta of a stream must contain whole calls. These
# are the beginnings of the clients' user agents.
NEED_WHOLE_CALLS = ("mistral-client-python/", "mistral-client-typescript/")


async def chat_completions(state: ApiState, request: Request) -> Response:
    """Answer messages; with ``stream``, by server-sent events."""

    def convert(body: ChatRequest) -> tuple[ChatRequest, Conversation]:
        state.admit(body.model)
        return body, body.conversation(state.sampling_defaults, state.context_len)

    body, asked = await read_body(request, ChatRequest, convert, state.config.serve)
    found = await open_conversation(state, request.scope, asked)
    is_named = asked.tools is not None and asked.tools.named
    shape = _ChatReply(state, body, found.prompt_ids, found.chance, is_named=is_named)
    if request.headers.get("user-agent", "").startswith(NEED_WHOLE_CALLS):
        shape.whole_calls = defaultdict(WholeCalls)
    return await reply(request, found.generation, shape, stream=bool(body.stream))


class _ChatReply(Reply):
    """Converts pieces of the answer to chat completion objects.

    Attributes:
        whole_calls: for each choice, the calls that are held back until they are complete; None if
            the client accepts calls in pieces.
    """

    def __init__(
        self,
        state: ApiState,
        body: ChatRequest,
        prompt_ids: list[int],
        chance: Chance,
        *,
        is_named: bool,
    ) -> None:
        kind = "chat.completion", "chat.completion.chunk"
        super().__init__(state, "chatcmpl", kind, body.streaming(), chance)
        self._body = body
        self._prompt_ids = prompt_ids
        self._name = chance.name
        self._is_named = is_named
        self._begun: set[int] = set()
        self._calling: set[int] = set()  # indices of the choices that have called a tool
        self.whole_calls: defaultdict[int, WholeCalls] | None = None

    def frames(self, usage: Usage | None, piece: ChoicePiece) -> bytes:
        delta = {"content": piece.text} if piece.text else {}
        events: Sequence[Event] = piece.events
        if self.whole_calls is not None:
            is_last = piece.finish_reason is not None
            events = self.whole_calls[piece.index].add(events, is_last=is_last)
        if events:
            delta = delta_of(events, self._name_of(piece))
        has_more = len(piece.logprobs) > piece.has_end_token
        logprobs = self._logprobs(piece) if has_more else None
        choice = self._choice(piece.index, delta, logprobs, self._finish_reason(piece))
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
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

    def whole(self, generation: Generation, pieces: list[list[ChoicePiece]]) -> dict[str, Any]:
        choices = []
        for piece in map(joined, pieces):
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            if piece.events:
                message = message_of(piece.events, self._name_of(piece))
            choices.append(
                {
                    "index": piece.index,
                    "message": message,
                    "logprobs": self._logprobs(piece) if self._body.logprobs else None,
                    "finish_reason": self._finish_reason(piece),
                    "stop_reason": piece.stop_reason,
                }
            )
            if self._body.return_token_ids:
                choices[-1]["token_ids"] = piece.token_ids
        reply = self.body(choices, generation.usage.as_json()) | transfer_of(generation, choices)
        if self._body.prompt_logprobs is not None:
            parts = joined(pieces[0]).prompt_logprobs
            reply["prompt_logprobs"] = prompt_logprobs(self.state.tokenizer, parts)
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = self._prompt_ids
        return reply

    def _name_of(self, piece: ChoicePiece) -> str:
        return f"{self._name}-{piece.index}"

    def _finish_reason(self, piece: ChoicePiece) -> str | None:
        if piece.events and any(isinstance(event, CallBegin) for event in piece.events):
            self._calling.add(piece.index)
        has_calls = piece.index in self._calling and not self._is_named
        return "tool_calls" if has_calls and piece.finish_reason == "stop" else piece.finish_reason

    def _logprobs(self, piece: ChoicePiece) -> dict[str, Any]:
        num_shown = len(piece.logprobs) - piece.has_end_token
        rows, texts = piece.logprobs[:num_shown], piece.token_texts[:num_shown]
        return chat_logprobs(self.state.tokenizer, rows, texts)

    @staticmethod
    def _choice(
        index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
