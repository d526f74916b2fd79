"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.sampling import truncated
from dist_aclgraph.serve.openai.body import read_body
from dist_aclgraph.serve.openai.completions import encode_prompts
from dist_aclgraph.serve.openai.errors import json_response
from dist_aclgraph.serve.openai.generation import ChoicePiece, ClientGoneError
from dist_aclgraph.serve.openai.reply import CLIENT_GONE
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.pooling.portions import answer_prompts, usage_of
from dist_aclgraph.serve.pooling.types import EmbeddingRequest
from dist_aclgraph.text.embedding import EMBEDDING, embeddings_of


async def embeddings(state: ApiState, request: Request) -> Response:
    """The embeddings of one or more texts."""

    def convert(body: EmbeddingRequest) -> tuple[EmbeddingRequest, list[str] | list[list[int]]]:
        state.admit(body.model, ("embed",))
        return body, body.prompts(state.context_len)

    body, given = await read_body(request, EmbeddingRequest, convert, state.config.serve)
    size = state.task.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise InvalidParameterError(
            f"dimensions is {body.dimensions}; embeddings of this model have {size}", "dimensions"
        )

    def encode() -> list[list[int]]:
        most, kept = body.most_prompt_tokens(state.context_len), body.truncate_prompt_tokens
        prompts = [
            truncated(ids, kept, state.context_len, 1)
            for ids in encode_prompts(state, given, most, "input")
        ]
        for ids in prompts:
            state.fit(len(ids), 1, None, "input")
        return prompts

    # Encode on a thread, because long texts must not delay the streams of other requests.
    prompts = await asyncio.to_thread(encode)
    try:
        pieces = await answer_prompts(state, request, prompts, EMBEDDING)
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    return await asyncio.to_thread(_reply, state, body, pieces, prompts)


def _reply(
    state: ApiState,
    body: EmbeddingRequest,
    pieces: Sequence[ChoicePiece],
    prompts: Sequence[list[int]],
) -> Response:
    states = [piece.embedding for piece in pieces]
    found = embeddings_of(states, dimensions=body.dimensions, normalizes=state.task.normalizes)
    # bytes, because the JSON encoder writes bytes as base64
    is_base64 = body.encoding_format == "base64"
    values = [row.astype("<f4").tobytes() for row in found] if is_base64 else found.tolist()
    return json_response(
        {
            "id": state.new_id("embd"),
            "object": "list",
            "created": int(time.time()),
            "model": state.config.name,
            "data": [
                {"object": "embedding", "index": index, "embedding": value}
                for index, value in enumerate(values)
            ],
            "usage": usage_of(prompts),
        }
    )
