"""The smaller endpoints: models, health, readiness, version, metrics, status, tokenization."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from dist_aclgraph.errors import EngineUnavailableError
from dist_aclgraph.serve.observe.status import page_response
from dist_aclgraph.serve.openai.body import read_body
from dist_aclgraph.serve.openai.counted import decode_ids
from dist_aclgraph.serve.openai.errors import json_response, prompt_in
from dist_aclgraph.serve.openai.state import WRITING, ApiState
from dist_aclgraph.serve.openai.types import DetokenizeRequest, TokenizeRequest
from dist_aclgraph.shapes.model_task import TASKS
from dist_aclgraph.text.chat_template import ChatOptions
from dist_aclgraph.version import VERSION

MAX_TOKENS = 1 << 16  # maximum number of tokens that one request may tokenize, or turn into text
_Chat: TypeAlias = tuple[list[dict[str, Any]], ChatOptions]


async def list_models(state: ApiState, request: Request) -> Response:
    """The one model that this server has, listed once for each of its names."""
    models = [_model(state, name) for name in state.config.names]
    # Anthropic's clients read the last three fields.
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
    return json_response({"object": "list", "data": models, **ends})


async def show_model(state: ApiState, request: Request) -> Response:
    """One model, found by its name."""
    name = request.path_params["model_id"]
    state.admit(name, TASKS)
    return json_response(_model(state, name))


async def health(state: ApiState, request: Request) -> Response:
    """200 while a group is alive or is being replaced, with the progress; 503 if all groups are
    dead.
    """
    state.raise_if_dead()
    if outage := state.client.outage():
        return json_response({"status": "recovering", "reason": outage})
    return json_response({"status": "ok"})


async def ping(state: ApiState, request: Request) -> Response:
    """Alias of /health, for load balancers that use this path."""
    return await health(state, request)


async def ready(state: ApiState, request: Request) -> Response:
    """Status 200 if a request would run at once. The body contains the number of groups in each
    state.
    """
    state.raise_if_dead()
    if state.is_draining:
        raise EngineUnavailableError("the server is stopping")
    if outage := state.client.outage():
        raise EngineUnavailableError(outage)
    capacity = state.client.capacity()
    groups = {**capacity.by_state(), "total": capacity.total}
    if capacity.prefill is not None:
        groups["prefill"] = capacity.prefill
    return json_response({"status": "ready", "groups": groups, "lost": capacity.lost})


async def version(state: ApiState, request: Request) -> Response:
    """The version of this server."""
    return json_response({"version": VERSION})


async def load(state: ApiState, request: Request) -> Response:
    """The number of completions that run or wait in this replica."""
    return json_response({"server_load": state.slots.taken})


async def load_v1(state: ApiState, request: Request) -> Response:
    """The same as /load, under the name that clients with a base URL of /v1 use."""
    return await load(state, request)


async def metrics(state: ApiState, request: Request) -> Response:
    """Prometheus metrics of this replica and of the engines."""
    text = await asyncio.to_thread(state.metrics.expose)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def status_page(state: ApiState, request: Request) -> Response:
    """The status page: groups, plan, streams, caches, rates and latencies, updated live."""
    return page_response()


async def status_numbers(state: ApiState, request: Request) -> Response:
    """The numbers of the status page: the numbers of /metrics, and the last ten minutes."""
    answer = await state.status.current()
    return Response(answer, headers={"Cache-Control": "no-store"}, media_type="application/json")


async def tokenize(state: ApiState, request: Request) -> Response:
    """The token ids of a prompt, or of messages after the chat template was applied."""

    def convert(body: TokenizeRequest) -> tuple[TokenizeRequest, _Chat | None]:
        state.admit(body.model, TASKS)
        return body, body.chat()

    body, chat = await read_body(request, TokenizeRequest, convert, state.config.serve)
    return json_response(await asyncio.to_thread(_tokenize, state, body, chat))


async def detokenize(state: ApiState, request: Request) -> Response:
    """The text of token ids."""

    def convert(body: DetokenizeRequest) -> list[int]:
        state.admit(body.model, TASKS)
        return decode_ids(body.tokens, MAX_TOKENS, "tokens")

    ids = await read_body(request, DetokenizeRequest, convert, state.config.serve)
    text = await asyncio.to_thread(state.tokenizer.decode, ids, skip_special_tokens=False)
    return json_response({"prompt": text})


def _tokenize(state: ApiState, body: TokenizeRequest, chat: _Chat | None) -> dict[str, Any]:
    tokenizer = state.tokenizer
    most = max(MAX_TOKENS, state.context_len)
    if chat is not None:
        with prompt_in("messages"):
            ids = tokenizer.encode_chat(*chat, max_tokens=most)
    else:
        ids = tokenizer.encode(
            body.prompt or "", add_special_tokens=body.add_special_tokens, max_tokens=most
        )
    reply: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": state.context_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        reply["token_strs"] = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    return reply


def _model(state: ApiState, name: str) -> dict[str, Any]:
    writes = state.task.name in WRITING
    return {
        "id": name,
        "object": "model",
        "created": state.created_s,
        "owned_by": "dist_aclgraph",
        "root": state.config.model,
        "parent": None,
        "max_model_len": state.context_len,
        # Mistral's client refuses models without these two fields.
        "type": "base",
        "capabilities": {"completion_chat": writes, "function_calling": writes},
        # Anthropic's clients show these two fields.
        "display_name": name,
        "created_at": datetime.fromtimestamp(state.created_s, UTC).isoformat(),
    }
