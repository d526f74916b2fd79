"""Our errors as HTTP statuses and OpenAI's error object: the one home of that rule.

| error | status | type |
| --- | --- | --- |
| UnknownModelError | 404 | not_found_error |
| UnauthorizedError | 401 | authentication_error |
| ForbiddenError | 403 | permission_error |
| BodyTimeoutError | 408 | invalid_request_error |
| BodyTooLargeError | 413 | invalid_request_error |
| NotJsonError | 415 | invalid_request_error |
| RequestError and its other children | 400 | invalid_request_error |
| QueueFullError, EngineUnavailableError | 503 + Retry-After | service_unavailable |
| everything else | 500 | internal_error |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from dist_aclgraph.errors import (
    DistAclGraphError,
    EngineUnavailableError,
    RequestError,
    UnknownModelError,
)

RETRY_AFTER_S = 1


class BodyTooLargeError(RequestError):
    """The request body exceeds the configured size."""

    code = "request_too_large"


class BodyTimeoutError(RequestError):
    """The client took longer to send the request body than is allowed."""

    code = "request_timeout"


class UnauthorizedError(RequestError):
    """The request has no valid API key."""

    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """The request comes from a page of another site, or for another host."""

    code = "forbidden"


class NotJsonError(RequestError):
    """The request body is not JSON."""

    code = "unsupported_media_type"


STATUS_OF: dict[type[DistAclGraphError], int] = {
    UnauthorizedError: 401,
    ForbiddenError: 403,
    UnknownModelError: 404,
    BodyTimeoutError: 408,
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


def status_of(error: BaseException) -> int:
    return next((status for kind, status in STATUS_OF.items() if isinstance(error, kind)), 500)


def error_body(error: BaseException) -> dict[str, Any]:
    """Return ``{"error": {...}}``; what is not our own error gives away nothing of itself."""
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
    status = status_of(error)
    headers = {503: {"Retry-After": str(RETRY_AFTER_S)}, 401: {"WWW-Authenticate": "Bearer"}}
    return json_response(error_body(error), status, headers.get(status))


def plain_error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error that is none of ours, such as an unknown path or method."""
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
