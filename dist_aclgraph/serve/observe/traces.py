"""OpenTelemetry traces: one span for each POST request, sent to a collector (``serve.traces``).

A span is made after its request has ended, from the times in the request's account, so tracing does
not slow running requests. A thread of OpenTelemetry sends the spans. If the collector is slow or
unreachable, spans beyond a limit are dropped, and no request waits. Without ``serve.traces``, no
module of OpenTelemetry is imported.
"""

from __future__ import annotations

import time
from typing import Any

from dist_aclgraph.extras import require
from dist_aclgraph.serve.observe.request_account import DONE, FIRST_SERVER_ERROR, RequestAccount
from dist_aclgraph.version import VERSION

MAX_SPANS = 2048  # maximum number of spans that wait to be sent
SEND_S = 10.0  # limit of one attempt to send spans
FLUSH_S = 5.0  # limit of the last attempt, when the ingress ends


def check_packages() -> None:
    """Check that traces can be exported.

    Raises:
        MissingPackageError: OpenTelemetry's packages are not installed.
    """
    require("opentelemetry.exporter.otlp.proto.http", "otel", "serve.traces")


class Traces:
    """Owns the tracer, and the thread that sends spans.

    Args:
        exporter: sends the spans; with None, the spans are sent by HTTP to ``endpoint``.

    Raises:
        MissingPackageError: OpenTelemetry's packages are not installed.
    """

    def __init__(self, endpoint: str, model_name: str, exporter: Any = None) -> None:
        check_packages()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = {"service.name": "dist_aclgraph", "service.version": VERSION}
        self._provider = TracerProvider(resource=Resource.create(resource))
        exporter = exporter or OTLPSpanExporter(endpoint=endpoint, timeout=SEND_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_SPANS))
        self._tracer = self._provider.get_tracer("dist_aclgraph")
        self._parents = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)
        self._model_name = model_name

    def export(self, account: RequestAccount) -> None:
        """Queue the span of a request that has ended. Does not wait."""
        now_s, now_ns = time.monotonic(), time.time_ns()

        def at_ns(at_s: float) -> int:
            return now_ns - int((now_s - at_s) * 1e9)

        scope = account.scope
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        span = self._tracer.start_span(
            f"{scope['method']} {scope['path']}",
            context=self._parents.extract(headers),
            kind=self._kind,
            start_time=at_ns(account.began_s),
            attributes=self._attributes(account),
        )
        if account.submitted_s is not None:
            span.add_event("submitted", timestamp=at_ns(account.submitted_s))
        if account.first_token_s is not None:
            span.add_event("first_token", timestamp=at_ns(account.first_token_s))
        if account.outcome != DONE and (account.error or account.status >= FIRST_SERVER_ERROR):
            span.set_attribute("error.type", account.outcome)
            span.set_status(self._failed)
        span.end(now_ns)

    def _attributes(self, account: RequestAccount) -> dict[str, Any]:
        """Return a span's attributes, by the names of OpenTelemetry's conventions."""
        found: dict[str, Any] = {
            "http.request.method": account.scope["method"],
            "url.path": account.scope["path"],
            "http.response.status_code": account.status,
            "gen_ai.request.model": self._model_name,
            "dist_aclgraph.request_id": account.request_id,
        }
        if account.submitted_s is not None:
            found["gen_ai.usage.input_tokens"] = account.num_prompt_tokens
            found["gen_ai.usage.output_tokens"] = account.num_tokens
        if account.finish_reason is not None:
            found["gen_ai.response.finish_reasons"] = (account.finish_reason,)
        if account.first_token_s is not None:
            found["gen_ai.latency.time_to_first_token"] = account.first_token_s - account.began_s
        return found

    def close(self) -> None:
        """Send the waiting spans, with a short time limit; then end the thread."""
        self._provider.force_flush(int(FLUSH_S * 1e3))
        self._provider.shutdown()
