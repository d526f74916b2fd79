"""Our errors as HTTP statuses and OpenAI's error object: only this module has that rule.

| error | status | type |
| --- | --- | --- |
| UnknownModelError | 404 | not_found_error |
| UnauthorizedError | 401 | authentication_error |
| ForbiddenError | 403 | permission_error |
| BodyTimeoutError, GenerationTimeoutError | 408 | invalid_request_error |
| BodyTooLargeError | 413 | invalid_request_error |
| NotJsonError | 415 | invalid_request_error |
| RequestError and its other children | 400 | invalid_request_error |
| QueueFullError, EngineUnavailableError | 503 + Retry-After | service_unavailable |
| everything else | 500 | internal_error |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from dist_aclgraph.errors import (
    DistAclGraphError,
    EngineUnavailableError,
    RequestError,
    UnknownModelError,
)

RETRY_AFTER_S = 1
T = TypeVar("T")


class BodyTooLargeError(RequestError):
    """The request body exceeds the configured size."""

    code = "request_too_large"


class BodyTimeoutError(RequestError):
    """The client took longer to send the request body than is allowed."""

    code = "request_timeout"


class GenerationTimeoutError(RequestError):
    """The answer took longer than is allowed. A retry would take as long again."""

    code = "generation_timeout"


class UnauthorizedError(RequestError):
    """The request has no valid API key."""

    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """The request comes from a page of another site, or names another host."""

    code = "forbidden"


class NotJsonError(RequestError):
    """The request body is not JSON."""

    code = "unsupported_media_type"


STATUS_OF: dict[type[DistAclGraphError], int] = {
    UnauthorizedError: 401,
    ForbiddenError: 403,
    UnknownModelError: 404,
    BodyTimeoutError: 408,
    GenerationTimeoutError: 408,
    BodyTooLargeError: 413,
    NotJsonError: 415,
    RequestError: 400,
    EngineUnavailableError: 503,
}
TYPE_OF = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "internal_error",
    503: "service_unavailable",
}


# The openai client retries after a 408 unless a header forbids it.
HEADERS_OF: dict[type[DistAclGraphError], Mapping[str, str]] = {
    UnauthorizedError: {"WWW-Authenticate": "Bearer"},
    GenerationTimeoutError: {"X-Should-Retry": "false"},
    EngineUnavailableError: {"Retry-After": str(RETRY_AFTER_S)},
}


def status_of(error: BaseException) -> int:
    return _of_kind(STATUS_OF, error, 500)


def _of_kind(table: Mapping[type[DistAclGraphError], T], error: BaseException, other: T) -> T:
    return next((found for kind, found in table.items() if isinstance(error, kind)), other)


def error_body(error: BaseException) -> dict[str, Any]:
    """Return ``{"error": {...}}``; if the error is not one of ours, no details are shown."""
    status = status_of(error)
    ours = isinstance(error, DistAclGraphError)
    return {
        "error": {
            "message": str(error) if ours else "internal server error",
            "type": TYPE_OF.get(status, "invalid_request_error"),
            "param": error.param if isinstance(error, RequestError) else None,
            "code": error.code if isinstance(error, RequestError) else None,
        }
    }


def error_response(error: BaseException) -> Response:
    return json_response(error_body(error), status_of(error), _of_kind(HEADERS_OF, error, {}))


def plain_error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error of the HTTP layer, e.g. for an unknown path or method."""
    kind = TYPE_OF.get(status, "invalid_request_error")
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return json_response(body, status, headers)


def json_response(
    body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(body),
        status,
        headers=dict(headers or {}),
        media_type="application/json",
    )
