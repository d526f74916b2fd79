"""Encodes refusals in advance, so that a full service needs little time for each refusal."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from http.client import responses
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

RawHeaders = Iterable[tuple[bytes, bytes]]


class Refusal:
    """The bytes of a response. The headers that differ between requests are added later."""

    def __init__(self, response: Response) -> None:
        self._head = status_line(response.status_code) + header_lines(response.raw_headers)
        self._body = b"\r\n" + bytes(response.body)

    def with_headers(self, headers: RawHeaders) -> bytes:
        return self._head + header_lines(headers) + self._body


class GatedApp(Protocol):
    """An ASGI application with the method ``refusal``. The server calls this method first; after a
    refusal, it does not call the application.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def refusal(self, method: bytes, path: bytes) -> Refusal | None:
        """Return the refusal; None if the application must be called.

        Args:
            path: the path as the client wrote it, with its query.
        """
        ...


@lru_cache
def status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {responses.get(status, '')}\r\n".encode()


def header_lines(headers: RawHeaders) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])
