"""make_api: the FastAPI application over one ApiState. No Ray and no torch here.

Bodies are read by ``read_body`` and not by FastAPI, which would answer 422 and accept NaN; the
OpenAPI document gets their schemas from the same structs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from dist_aclgraph.errors import DistAclGraphError, InvalidParameterError
from dist_aclgraph.serve.http.access import Access
from dist_aclgraph.serve.http.edge import Edge
from dist_aclgraph.serve.openai import misc, openapi
from dist_aclgraph.serve.openai.chat import chat_completions
from dist_aclgraph.serve.openai.completions import completions
from dist_aclgraph.serve.openai.errors import error_response, plain_error
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.version import VERSION

Endpoint = Callable[[ApiState, Request], Awaitable[Response]]
POSTS: dict[str, Endpoint] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/tokenize": misc.tokenize,
    "/detokenize": misc.detokenize,
}
GETS: dict[str, Endpoint] = {
    "/v1/models": misc.list_models,
    "/v1/models/{model_id:path}": misc.show_model,
    "/health": misc.health,
    "/ready": misc.ready,
    "/version": misc.version,
    "/metrics": misc.metrics,
    "/": misc.status_page,
    "/status.json": misc.status_numbers,
}


def make_api(state: ApiState, access: Access | None = None, *, names_requests: bool = True) -> Edge:
    """Build the application; everything it needs it takes from ``state``.

    Args:
        access: who may ask; by default everyone.
        names_requests: whether to answer with X-Request-Id; off where a proxy does it.
    """
    api = FastAPI(title="dist_aclgraph", version=VERSION)
    for path, endpoint in POSTS.items():
        _add(api, path, "POST", _bind(state, endpoint))
    for path, endpoint in GETS.items():
        _add(api, path, "GET", _bind(state, endpoint))
    api.add_exception_handler(DistAclGraphError, _our_error)
    api.add_exception_handler(RequestValidationError, _validation_error)
    api.add_exception_handler(HTTPException, _router_error)
    api.add_exception_handler(Exception, _unknown_error)
    schemas = openapi.components(lenient=state.config.serve.lenient)

    def document() -> dict[str, Any]:
        if api.openapi_schema is None:
            api.openapi_schema = get_openapi(
                title=api.title, version=api.version, routes=api.routes
            )
            api.openapi_schema.setdefault("components", {})["schemas"] = schemas
        return api.openapi_schema

    api.openapi = document  # type: ignore[method-assign]  # the way that FastAPI documents
    # Outside of FastAPI, whose own layers cost as much as the rest of a refusal.
    return Edge(api, access or Access(), state, names_requests=names_requests)


def _add(api: FastAPI, path: str, method: str, route: Callable[..., Any]) -> None:
    # In the document a path has the plain form, without Starlette's converter.
    plain = path.replace(":path", "")
    api.add_api_route(
        path,
        route,
        methods=[method],
        name=path,
        response_class=Response,
        response_model=None,
        openapi_extra=openapi.operation(plain),
    )


def _bind(state: ApiState, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        return await endpoint(state, request)

    # FastAPI reads the annotations; as strings they would not resolve inside this function.
    route.__annotations__ = {"request": Request, "return": Response}
    route.__doc__ = endpoint.__doc__
    return route


async def _our_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _validation_error(request: Request, error: Exception) -> Response:
    return error_response(InvalidParameterError("the request is not valid"))


async def _router_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return plain_error(error.status_code, str(error.detail), error.headers)


async def _unknown_error(request: Request, error: Exception) -> Response:
    return error_response(error)
