"""POST /v1/score and POST /v1/rerank: the relevance of documents for a query."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dist_aclgraph.serve.openai.body import read_body
from dist_aclgraph.serve.openai.errors import json_response, prompt_in
from dist_aclgraph.serve.openai.generation import ClientGoneError
from dist_aclgraph.serve.openai.reply import CLIENT_GONE
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.pooling.portions import answer_prompts, usage_of
from dist_aclgraph.serve.pooling.types import RerankRequest, ScoreRequest


async def score(state: ApiState, request: Request) -> Response:
    """For each pair of a query and a document, the relevance of the document for the query."""

    def convert(body: ScoreRequest) -> tuple[ScoreRequest, list[tuple[str, str]]]:
        state.admit(body.model, ("rerank",))
        return body, body.pairs()

    body, pairs = await read_body(request, ScoreRequest, convert, state.config.serve)
    try:
        scores, usage = await _score_pairs(state, request, pairs, body, "text_2")
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    data = [{"object": "score", "index": i, "score": value} for i, value in enumerate(scores)]
    return json_response(
        {
            "id": state.new_id("score"),
            "object": "list",
            "created": int(time.time()),
            "model": state.config.name,
            "data": data,
            "usage": usage,
        }
    )


async def score_as_vllm(state: ApiState, request: Request) -> Response:
    """Alias of /v1/score, for vLLM's clients."""
    return await score(state, request)


async def rerank(state: ApiState, request: Request) -> Response:
    """Documents in the order of their relevance for a query."""

    def convert(body: RerankRequest) -> tuple[RerankRequest, list[str]]:
        state.admit(body.model, ("rerank",))
        return body, body.texts()

    body, documents = await read_body(request, RerankRequest, convert, state.config.serve)
    pairs = [(body.query, document) for document in documents]
    try:
        scores, usage = await _score_pairs(state, request, pairs, body, "documents")
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    results = []
    for index in sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents is not False:
            result["document"] = {"text": documents[index]}
        results.append(result)
    return json_response(
        {
            "id": state.new_id("rerank"),
            "model": state.config.name,
            "results": results,
            "usage": usage,
        }
    )


async def rerank_as_jina(state: ApiState, request: Request) -> Response:
    """Alias of /v1/rerank, for clients that use this path."""
    return await rerank(state, request)


async def rerank_as_cohere(state: ApiState, request: Request) -> Response:
    """Alias of /v1/rerank, for Cohere's clients."""
    return await rerank(state, request)


async def _score_pairs(
    state: ApiState,
    request: Request,
    pairs: Sequence[tuple[str, str]],
    body: ScoreRequest | RerankRequest,
    param: str,
) -> tuple[list[float], dict[str, int]]:
    """Return the score of each pair of a query and a document, and the usage of the request.

    Raises:
        ClientGoneError: the client has disconnected.
        RequestTooLongError: a pair is too long; the message names ``param``.
        DistAclGraphError: a pair failed.
    """
    reranker = state.reranker
    assert reranker is not None  # ``admit`` has checked the task

    def encode() -> list[list[int]]:
        prompts, most = [], body.truncate_prompt_tokens
        if most == -1:
            most = state.context_len - 1
        for query, document in pairs:
            with prompt_in(param):
                ids = reranker.encode(
                    query, document, body.instruction, max_tokens=state.context_len, most=most
                )
            state.fit(len(ids), 1, None, param)
            prompts.append(ids)
        return prompts

    # Encode on a thread, because long texts must not delay the streams of other requests.
    prompts = await asyncio.to_thread(encode)
    pieces = await answer_prompts(state, request, prompts, reranker.params)
    rows = [piece.logprobs[0].ranked() for piece in pieces]
    scores = [
        reranker.score({token: logprob for token, (logprob, _) in row.items()}) for row in rows
    ]
    return scores, usage_of(prompts)
