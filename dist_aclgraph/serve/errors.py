"""Our errors as HTTP statuses and OpenAI's error object: the one home of that rule.

| error | status | type |
| --- | --- | --- |
| UnknownModelError | 404 | not_found_error |
| BodyTimeoutError | 408 | invalid_request_error |
| BodyTooLargeError | 413 | invalid_request_error |
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


def status_of(error: BaseException) -> int:
    if isinstance(error, UnknownModelError):
        return 404
    if isinstance(error, BodyTimeoutError):
        return 408
    if isinstance(error, BodyTooLargeError):
        return 413
    if isinstance(error, RequestError):
        return 400
    return 503 if isinstance(error, EngineUnavailableError) else 500


def error_body(error: BaseException) -> dict[str, Any]:
    """Return ``{"error": {...}}``; what is not our own error gives away nothing of itself."""
    status = status_of(error)
    kind = {404: "not_found_error", 503: "service_unavailable", 500: "internal_error"}
    ours = isinstance(error, DistAclGraphError)
    return {
        "error": {
            "message": str(error) if ours else "internal server error",
            "type": kind.get(status, "invalid_request_error"),
            "param": error.param if isinstance(error, RequestError) else None,
            "code": error.code if isinstance(error, RequestError) else None,
        }
    }


def error_response(error: BaseException) -> Response:
    status = status_of(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return json_response(error_body(error), status, headers)


def plain_error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error that the router found, such as an unknown path or method."""
    body = {
        "error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    }
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
