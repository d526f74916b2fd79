"""Server-sent events: one ``data:`` frame per chunk."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.serve.errors import error_body

log = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def frame(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Frame chunks and end with [DONE]; after a failure, with one error frame and no [DONE]."""
    try:
        async for chunk in chunks:
            yield frame(chunk)
    except DistAclGraphError as e:
        yield frame(error_body(e))
        return
    except Exception as e:  # a bug of ours: the client must still learn that this is no end
        log.exception("a stream failed")
        yield frame(error_body(e))
        return
    yield DONE
