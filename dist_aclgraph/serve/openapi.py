"""Makes the OpenAPI document. Schemas of bodies come from structs; this file contains all other
schemas.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from dist_aclgraph.serve.anthropic.types import CountTokensRequest, MessagesRequest
from dist_aclgraph.serve.openai.body import Body, strict
from dist_aclgraph.serve.openai.chat_message import ChatMessage
from dist_aclgraph.serve.openai.errors import ANTHROPIC_PATH
from dist_aclgraph.serve.openai.types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from dist_aclgraph.serve.pooling.types import EmbeddingRequest, RerankRequest, ScoreRequest
from dist_aclgraph.serve.responses.types import ResponsesRequest
from dist_aclgraph.version import VERSION

Json = dict[str, Any]
REF = "#/components/schemas/{name}"
BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/score": ScoreRequest,
    "/score": ScoreRequest,
    "/v1/rerank": RerankRequest,
    "/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
}
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
ERRORS = {
    400: "The request is not valid.",
    401: "The API key is missing or wrong.",
    403: "The request comes from a page of another site.",
    404: "There is no such model, or the model is for another task.",
    408: "The body did not arrive in time, or the answer took too long.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "The API key has reached a limit; Retry-After says when to try again.",
    500: "The server failed.",
    503: "No request can be taken now; Retry-After says when to try again.",
}
_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
_TEXT_OR_NULL = {"type": ["string", "null"]}


def _object(**properties: Json) -> Json:
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


_USAGE = _object(prompt_tokens=_INTEGER, completion_tokens=_INTEGER, total_tokens=_INTEGER)
_HEAD = {"id": _STRING, "object": _STRING, "created": _INTEGER, "model": _STRING}
_CHOICE: Json = {
    "index": _INTEGER,
    "logprobs": {"type": ["object", "null"]},
    "finish_reason": _TEXT_OR_NULL,
}
_CHAT_CHOICE = _object(**_CHOICE, message=_object(role=_STRING, content=_TEXT_OR_NULL))
_PROMPT_USAGE = _object(prompt_tokens=_INTEGER, total_tokens=_INTEGER)
_VECTOR: Json = {"anyOf": [_list({"type": "number"}), _STRING]}
_EMBEDDING = _object(object=_STRING, index=_INTEGER, embedding=_VECTOR)
_SCORE = _object(object=_STRING, index=_INTEGER, score={"type": "number"})
_RESULT = _object(index=_INTEGER, relevance_score={"type": "number"})
_SCORED = _object(**_HEAD, data=_list(_SCORE), usage=_PROMPT_USAGE)
_RERANKED = _object(id=_STRING, model=_STRING, results=_list(_RESULT), usage=_PROMPT_USAGE)
_MODEL = _object(id=_STRING, object=_STRING, created=_INTEGER, owned_by=_STRING)
REPLIES: dict[str, Json] = {
    "/v1/chat/completions": _object(**_HEAD, choices=_list(_CHAT_CHOICE), usage=_USAGE),
    "/v1/completions": _object(
        **_HEAD, choices=_list(_object(**_CHOICE, text=_STRING)), usage=_USAGE
    ),
    "/v1/responses": _object(
        id=_STRING,
        object={"const": "response"},
        created_at=_INTEGER,
        model=_STRING,
        status={"enum": ["completed", "incomplete"]},
        output=_list({"type": "object"}),
        usage=_object(input_tokens=_INTEGER, output_tokens=_INTEGER, total_tokens=_INTEGER),
    ),
    "/v1/responses/input_tokens": _object(
        object={"const": "response.input_tokens"}, input_tokens=_INTEGER
    ),
    "/v1/messages": _object(
        id=_STRING,
        type={"const": "message"},
        role={"const": "assistant"},
        model=_STRING,
        content=_list({"type": "object"}),
        stop_reason=_STRING,
        stop_sequence=_TEXT_OR_NULL,
        usage=_object(input_tokens=_INTEGER, output_tokens=_INTEGER),
    ),
    "/v1/messages/count_tokens": _object(input_tokens=_INTEGER),
    "/tokenize": _object(count=_INTEGER, max_model_len=_INTEGER, tokens=_list(_INTEGER)),
    "/detokenize": _object(prompt=_STRING),
    "/v1/embeddings": _object(**_HEAD, data=_list(_EMBEDDING), usage=_PROMPT_USAGE),
    "/v1/score": _SCORED,
    "/score": _SCORED,
    "/v1/rerank": _RERANKED,
    "/rerank": _RERANKED,
    "/v2/rerank": _RERANKED,
    "/v1/models": _object(object=_STRING, data=_list(_MODEL)),
    "/v1/models/{model_id}": _MODEL,
    "/health": _object(status=_STRING),
    "/ping": _object(status=_STRING),
    "/ready": _object(status=_STRING),
    "/version": _object(version=_STRING),
    "/load": _object(server_load=_INTEGER),
    "/v1/load": _object(server_load=_INTEGER),
    "/status.json": _object(
        model=_STRING,
        version=_STRING,
        replica=_STRING,
        metrics={"type": "object"},
        lost={"type": "object"},
        history={"type": "object"},
    ),
}
# For each JSON type of a field, the other JSON types that the service accepts for the field.
DECODED_FROM = {"integer": ("string",), "number": ("string",), "boolean": ("integer", "string")}
SECURITY_SCHEMES: Json = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
TEXTS = {"/metrics": "text/plain", "/": "text/html"}
ERROR = _object(
    error=_object(message=_STRING, type=_STRING, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)
)
ANTHROPIC_ERROR = _object(type={"const": "error"}, error=_object(type=_STRING, message=_STRING))


def document(
    endpoints: Mapping[str, Mapping[str, Callable[..., Any]]],
    *,
    is_strict: bool,
    open_paths: Collection[str] | None,
) -> Json:
    """Return the OpenAPI document.

    Args:
        endpoints: endpoint functions by method and path. An endpoint's docstring is its path's
            description.
        is_strict: whether unknown request fields are refused.
        open_paths: the paths that need no key; None if the service has no keys.
    """
    paths: Json = {}
    for method, endpoints_of in endpoints.items():
        for path, endpoint in endpoints_of.items():
            plain = path.replace(":path", "")  # removes Starlette's converter
            paths[plain] = {method: _operation(plain, endpoint)}
            if open_paths is not None and path in open_paths:
                paths[plain][method]["security"] = []
    found: Json = {
        "openapi": "3.1.0",
        "info": {"title": "dist_aclgraph", "version": VERSION},
        "paths": paths,
        "components": {"schemas": _schemas(is_strict)},
    }
    if open_paths is not None:
        found["components"]["securitySchemes"] = SECURITY_SCHEMES
        found["security"] = [{name: []} for name in SECURITY_SCHEMES]
    return found


def _schemas(is_strict: bool) -> dict[str, Json]:
    kinds = [*BODIES.values(), ChatMessage]
    _, found = msgspec.json.schema_components(
        [strict(kind) if is_strict else kind for kind in kinds], ref_template=REF
    )
    bodies = {name: _as_decoded(schema) for name, schema in found.items()}
    return {**bodies, "Error": ERROR, "AnthropicError": ANTHROPIC_ERROR}


def _as_decoded(schema: Any) -> Any:
    """Return a body's schema, extended by the types in ``DECODED_FROM``."""
    if isinstance(schema, list):
        return [_as_decoded(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _as_decoded(value) for key, value in schema.items()}
    kinds = [kind] if isinstance(kind := schema.get("type"), str) else kind
    if isinstance(kinds, list):
        others = (other for each in kinds for other in DECODED_FROM.get(each, ()))
        if len(decoded := dict.fromkeys([*kinds, *others])) > len(kinds):
            found["type"] = list(decoded)
    return found


def _operation(path: str, endpoint: Callable[..., Any]) -> Json:
    """Return the document's entry for a path: its parameters, its body and its replies."""
    error = "AnthropicError" if path.startswith(ANTHROPIC_PATH) else "Error"
    errors = {
        str(status): {"description": text, "content": _json({"$ref": REF.format(name=error)})}
        for status, text in ERRORS.items()
    }
    reply: Json = {"description": "The answer."}
    if path in TEXTS:
        reply["content"] = {TEXTS[path]: {"schema": _STRING}}
    else:
        reply["content"] = _json(REPLIES[path])
    if path in STREAMS:
        # Streams have no schema: some programs would apply a schema to the whole text, and other
        # programs would apply it to each event.
        reply["content"]["text/event-stream"] = {}
    found: Json = {
        "operationId": endpoint.__name__,
        "summary": inspect.getdoc(endpoint),
        "responses": {"200": reply, **errors},
    }
    if path in BODIES:
        schema = {"$ref": REF.format(name=BODIES[path].__name__)}
        found["requestBody"] = {"content": _json(schema), "required": True}
    if "{model_id}" in path:
        found["parameters"] = [
            {"name": "model_id", "in": "path", "required": True, "schema": _STRING}
        ]
    return found


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}
