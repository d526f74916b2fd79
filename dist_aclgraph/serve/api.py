"""Builds the Starlette application for one ``ApiState``. Imports neither Ray nor torch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.serve import openapi
from dist_aclgraph.serve.anthropic.messages import count_tokens, messages
from dist_aclgraph.serve.http.access import OPEN_PATHS, Access
from dist_aclgraph.serve.http.edge import Edge
from dist_aclgraph.serve.observe.request_account import note_error
from dist_aclgraph.serve.openai import misc
from dist_aclgraph.serve.openai.body import IGNORED, shorten
from dist_aclgraph.serve.openai.chat import chat_completions
from dist_aclgraph.serve.openai.completions import completions
from dist_aclgraph.serve.openai.errors import error_response, json_response, plain_error
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.pooling.embeddings import embeddings
from dist_aclgraph.serve.pooling.scores import (
    rerank,
    rerank_as_cohere,
    rerank_as_jina,
    score,
    score_as_vllm,
)
from dist_aclgraph.serve.responses.responses import input_tokens, responses

Endpoint = Callable[[ApiState, Request], Awaitable[Response]]
POSTS: dict[str, Endpoint] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/responses/input_tokens": input_tokens,
    "/v1/messages": messages,
    "/v1/messages/count_tokens": count_tokens,
    "/v1/embeddings": embeddings,
    "/v1/score": score,
    "/score": score_as_vllm,
    "/v1/rerank": rerank,
    "/rerank": rerank_as_jina,
    "/v2/rerank": rerank_as_cohere,
    "/tokenize": misc.tokenize,
    "/detokenize": misc.detokenize,
}
GETS: dict[str, Endpoint] = {
    "/v1/models": misc.list_models,
    "/v1/models/{model_id:path}": misc.show_model,
    "/health": misc.health,
    "/ping": misc.ping,
    "/ready": misc.ready,
    "/version": misc.version,
    "/load": misc.load,
    "/v1/load": misc.load_v1,
    "/metrics": misc.metrics,
    "/": misc.status_page,
    "/status.json": misc.status_numbers,
}


def make_api(state: ApiState, access: Access | None = None, *, names_requests: bool = True) -> Edge:
    """Build the application for ``state``.

    Args:
        access: the rules that say which requests are allowed; None allows all requests.
        names_requests: whether responses get the header X-Request-Id; false if a proxy adds the
            header.
    """
    access = access or Access()
    document = openapi.document(
        {"get": GETS, "post": POSTS},
        is_strict=state.config.serve.strict,
        open_paths=OPEN_PATHS if access.keys is not None else None,
    )

    async def show_document(request: Request) -> Response:
        return json_response(document)

    routes = [
        *(
            Route(path, _bind(state, endpoint), methods=["POST"])
            for path, endpoint in POSTS.items()
        ),
        *(Route(path, _bind(state, endpoint)) for path, endpoint in GETS.items()),
        Route("/openapi.json", show_document),
    ]
    api = Starlette(
        routes=routes,
        exception_handlers={
            DistAclGraphError: _our_error,
            HTTPException: _router_error,
            Exception: _our_error,
        },
    )
    # ``Edge`` is not a middleware of Starlette, because a refusal that passes through Starlette's
    # layers takes twice as long.
    return Edge(api, access, state, partial(_methods_of, routes), names_requests=names_requests)


def _methods_of(routes: Sequence[Route], scope: Scope) -> str:
    """Return the methods that a request's path supports; for an unknown path, all methods."""
    found = [route for route in routes if route.matches(scope)[0] is not Match.NONE] or routes
    return ", ".join(sorted({"OPTIONS"}.union(*(route.methods or () for route in found))))


def _bind(state: ApiState, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        response = await endpoint(state, request)
        if paths := request.scope.get(IGNORED):
            state.ignored_fields.note(request.url.path, paths)
            response.headers["X-Ignored-Parameters"] = ", ".join(paths)
        return response

    return route


async def _our_error(request: Request, error: Exception) -> Response:
    note_error(request.scope, error)
    return error_response(error, request.scope["path"])


async def _router_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    is_unknown = error.status_code == HTTPStatus.NOT_FOUND
    message = _unknown_path(request.method, path) if is_unknown else str(error.detail)
    return plain_error(error.status_code, message, error.headers, path)


def _unknown_path(method: str, path: str) -> str:
    """Return the message for a path that the API does not have.

    Two mistakes are frequent: a client adds ``/v1`` to an address that already ends with ``/v1``,
    or the client's address lacks ``/v1``.
    """
    if "/v1/responses/" in path:
        return f"{method} {shorten(path)}: no response is stored"
    known = [name for name in (*POSTS, *GETS) if "{" not in name and len(name) > 1]
    likely = [
        name for name in known if name.endswith(path) or path.endswith(name.removeprefix("/v1"))
    ]
    hint = f"did you mean {max(likely, key=len)}?" if likely else "/openapi.json lists all paths"
    return f"there is no path {shorten(path)}; {hint}"
