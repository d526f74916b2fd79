"""The status page is one HTML file. The page requests its numbers as one JSON object.

The numbers come from the same metrics as /metrics. The engines are queried at most once per second,
even if many pages are open.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.core import Metric
from starlette.responses import Response

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.serve.observe.history import History
from dist_aclgraph.serve.observe.metrics import LABELS, PREFIX, RANK_LABELS, Metrics
from dist_aclgraph.version import VERSION

PAGE = Path(__file__).with_name("status.html").read_bytes()
MAX_AGE_S = 1.0


def _hashes(tag: bytes) -> str:
    """Return the hashes of the page's own blocks with this tag, as sources for the header
    Content-Security-Policy.
    """
    blocks = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), PAGE, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(block).digest()).decode() for block in blocks]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    f"script-src {_hashes(b'script')}; style-src {_hashes(b'style')}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_response() -> Response:
    """Return the page, which contains no data of this service."""
    return Response(PAGE, headers=PAGE_HEADERS, media_type="text/html")


class StatusNumbers:
    """Owns the history, and the JSON object that was created last."""

    def __init__(self, model_name: str, metrics: Metrics, client: EngineClient) -> None:
        self._model_name = model_name
        self._metrics = metrics
        self._client = client
        self._history = History()
        self._history.watch(metrics.collect, client)
        self._answer = b""
        self._answered_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def current(self) -> bytes:
        """Return the page's JSON object. The object is at most one second old. Only one event loop
        may call this.
        """
        if time.monotonic() - self._answered_s > MAX_AGE_S:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask())
            # Other requests wait for the same task, so a client that disconnects must not cancel
            # the task.
            await asyncio.shield(self._asking)
        return self._answer

    async def _ask(self) -> None:
        self._answer = await asyncio.to_thread(self._make)
        self._answered_s = time.monotonic()

    def _make(self) -> bytes:
        found = self._metrics.collect()
        answer = {
            "model": self._model_name,
            "version": VERSION,
            "replica": self._metrics.replica,
            "metrics": nested(found),
            "lost": self._client.capacity().lost,
            "history": self._history.report(time.monotonic()),
        }
        return msgspec.json.encode(answer)


def nested(found: Iterable[Metric]) -> dict[str, Any]:
    """Return gauges and counters by name. A metric with labels is nested by the labels' values.

    The result's names have no prefix. The labels for model and replica are omitted, because all
    metrics have the same values of these labels. For each rank, the value of ``rank_info`` is an
    object that contains the rank's labels.
    """
    metrics: dict[str, Any] = {}
    for metric in found:
        name = metric.name.removeprefix(PREFIX)
        for sample in metric.samples:
            if sample.name not in (metric.name, f"{metric.name}_total"):
                continue  # the sample is a part of a histogram
            labels = {key: text for key, text in sample.labels.items() if key not in LABELS}
            value: Any = sample.value
            if name == "rank_info":
                value = {label: labels.pop(label) for label in RANK_LABELS[1:]}
            _put(metrics, [name, *labels.values()], value)
    return metrics


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[last] = value
