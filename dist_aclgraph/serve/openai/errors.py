"""Converts our errors to HTTP statuses, and to error objects of OpenAI and of Anthropic.

No other module maps errors to statuses. If a request's path is below ``ANTHROPIC_PATH``, its error
has Anthropic's form. Responses with status 429 or 503 have the header Retry-After.

| error | status | type of OpenAI | type of Anthropic |
| --- | --- | --- | --- |
| UnknownModelError, WrongTaskError | 404 | not_found_error | not_found_error |
| UnauthorizedError | 401 | authentication_error | authentication_error |
| ForbiddenError | 403 | permission_error | permission_error |
| BodyTimeoutError, GenerationTimeoutError | 408 | invalid_request_error | timeout_error |
| BodyTooLargeError | 413 | invalid_request_error | request_too_large |
| NotJsonError | 415 | invalid_request_error | invalid_request_error |
| RateLimitError | 429 | rate_limit_error | rate_limit_error |
| RequestError and its other children | 400 | invalid_request_error | invalid_request_error |
| EngineUnavailableError, QueueFullError | 503 | service_unavailable | overloaded_error |
| everything else | 500 | internal_error | api_error |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from dist_aclgraph.errors import (
    DistAclGraphError,
    EngineUnavailableError,
    RequestError,
    RequestTooLongError,
    UnknownModelError,
)

RETRY_AFTER_S = 1
T = TypeVar("T")


class BodyTooLargeError(RequestError):
    """The request body exceeds the configured size."""

    code = "request_too_large"


class BodyTimeoutError(RequestError):
    """The client took too long to send the request body."""

    code = "request_timeout"


class GenerationTimeoutError(RequestError):
    """The answer took too long. A retry would probably take the same time."""

    code = "generation_timeout"


class WrongTaskError(RequestError):
    """The model's task is not a task of the endpoint."""

    code = "wrong_task"


class UnauthorizedError(RequestError):
    """The request has no valid API key."""

    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """The request's host is not allowed, or the request comes from a site that is not allowed."""

    code = "forbidden"


class ThreadError(RequestError):
    """The client asks the service to keep the conversation.

    Anthropic's clients recognise the error by its code. After this error, these clients send the
    whole conversation in each request.
    """

    code = "thread_unsupported_request"


class NotJsonError(RequestError):
    """The request body is not JSON."""

    code = "unsupported_media_type"


class RateLimitError(RequestError):
    """The request's API key has reached a limit. A retry can succeed after ``retry_after_s``."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, param: str | None = None, *, retry_after_s: int = 1) -> None:
        super().__init__(message, param)
        self.retry_after_s = retry_after_s


STATUS_OF: dict[type[DistAclGraphError], int] = {
    UnauthorizedError: 401,
    ForbiddenError: 403,
    UnknownModelError: 404,
    WrongTaskError: 404,
    BodyTimeoutError: 408,
    GenerationTimeoutError: 408,
    BodyTooLargeError: 413,
    NotJsonError: 415,
    RateLimitError: 429,
    RequestError: 400,
    EngineUnavailableError: 503,
}
TYPE_OF = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable",
}
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPE_OF = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}

# The openai client retries after a 408, unless a header forbids the retry.
HEADERS_OF: dict[type[DistAclGraphError], Mapping[str, str]] = {
    UnauthorizedError: {"WWW-Authenticate": "Bearer"},
    GenerationTimeoutError: {"X-Should-Retry": "false"},
    EngineUnavailableError: {"Retry-After": str(RETRY_AFTER_S)},
}


@contextmanager
def prompt_in(param: str) -> Iterator[None]:
    """Within this context, an error about the prompt's length names the field that contains the
    prompt.
    """
    try:
        yield
    except RequestTooLongError as e:
        raise RequestTooLongError(str(e), param) from None


def status_of(error: BaseException) -> int:
    return _of_kind(STATUS_OF, error, 500)


def _of_kind(table: Mapping[type[DistAclGraphError], T], error: BaseException, other: T) -> T:
    return next((found for kind, found in table.items() if isinstance(error, kind)), other)


def error_body(error: BaseException) -> dict[str, Any]:
    """Return ``{"error": {...}}``; details are shown only for our own errors."""
    status = status_of(error)
    return {
        "error": {
            "message": public_message(error),
            "type": TYPE_OF.get(status, "invalid_request_error"),
            "param": error.param if isinstance(error, RequestError) else None,
            "code": error.code if isinstance(error, RequestError) else None,
        }
    }


def anthropic_error_body(status: int, message: str) -> dict[str, Any]:
    """Return ``{"type": "error", "error": {...}}``."""
    kind = ANTHROPIC_TYPE_OF.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def public_message(error: BaseException) -> str:
    """Return the message about an error for the client, without secrets of the service."""
    return str(error) if isinstance(error, DistAclGraphError) else "internal server error"


def error_response(error: BaseException, path: str = "") -> Response:
    """Return the response for an error.

    Args:
        path: the request's path, which determines the form of the error.
    """
    status = status_of(error)
    body = error_body(error)
    if ANTHROPIC_PATH in path:  # a route prefix may come before ANTHROPIC_PATH
        body = anthropic_error_body(status, public_message(error))
        if isinstance(error, ThreadError):
            body["error"]["details"] = {"error_code": error.code}
    return json_response(body, status, _headers_of(error))


def _headers_of(error: BaseException) -> Mapping[str, str]:
    if isinstance(error, RateLimitError):
        return {"Retry-After": str(error.retry_after_s)}
    return _of_kind(HEADERS_OF, error, {})


def plain_error(
    status: int, message: str, headers: Mapping[str, str] | None = None, path: str = ""
) -> Response:
    """Return an error of the HTTP layer, e.g. for an unknown path or method."""
    if ANTHROPIC_PATH in path:  # a route prefix may come before ANTHROPIC_PATH
        return json_response(anthropic_error_body(status, message), status, headers)
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
