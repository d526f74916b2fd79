"""OpenTelemetry traces (``serve.traces``): one span for each POST request and for each of its
phases.

Spans are made after their request has ended, from the times in the request's account, so tracing
does not slow running requests. A thread of OpenTelemetry sends the spans. If the collector is slow
or unreachable, spans beyond a limit are dropped, and no request waits. Without ``serve.traces``, no
module of OpenTelemetry is imported.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from dist_aclgraph.extras import require
from dist_aclgraph.serve.observe.request_account import DONE, FIRST_SERVER_ERROR, RequestAccount
from dist_aclgraph.version import VERSION

MAX_SPANS = 2048  # maximum number of spans that wait to be sent
SEND_S = 10.0  # time limit of one attempt to send spans
FLUSH_S = 5.0  # time limit of the last attempt, when the ingress ends


def check_packages() -> None:
    """Check that traces can be exported.

    Raises:
        MissingPackageError: OpenTelemetry's packages are not installed.
    """
    require("opentelemetry.exporter.otlp.proto.http", "otel", "serve.traces")


class Traces:
    """Owns the tracer, and the thread that sends spans.

    Args:
        exporter: the object that sends the spans; with None, the spans are sent by HTTP to
            ``endpoint``.

    Raises:
        MissingPackageError: OpenTelemetry's packages are not installed.
    """

    def __init__(self, endpoint: str, model_name: str, exporter: Any = None) -> None:
        check_packages()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = {"service.name": "dist_aclgraph", "service.version": VERSION}
        self._provider = TracerProvider(resource=Resource.create(resource))
        exporter = exporter or OTLPSpanExporter(endpoint=endpoint, timeout=SEND_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_SPANS))
        self._tracer = self._provider.get_tracer("dist_aclgraph")
        self._parents = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._within = set_span_in_context
        self._failed = Status(StatusCode.ERROR)
        self._model_name = model_name

    def export(self, account: RequestAccount) -> None:
        """Queue the spans of a request that has ended. Does not wait."""
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
        for name, begin_s, end_s in _phases(account, now_s):
            child = self._tracer.start_span(
                name, context=self._within(span), start_time=at_ns(begin_s)
            )
            child.end(at_ns(end_s))
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


def _phases(account: RequestAccount, end_s: float) -> Iterator[tuple[str, float, float]]:
    """Yield each phase of a request that was sent to an engine: the phase's name, begin
    and end.

    The engine measures the prefill by its own clock. The phase ``queue`` is the rest of the time
    until the first token. This rest includes the time of the messages to and from the engine. If
    there are several choices, the phases of the choice with the earliest token are yielded.
    """
    submitted_s, first_s = account.submitted_s, account.first_token_s
    if submitted_s is None:
        return
    if first_s is None or not account.prefill_s:  # the time at which the wait ended is unknown
        yield "queue and prefill", submitted_s, end_s if first_s is None else first_s
    else:
        admitted_s = max(submitted_s, first_s - account.prefill_s)
        yield "queue", submitted_s, admitted_s
        yield "prefill", admitted_s, first_s
    if first_s is not None:
        yield "decode", first_s, end_s
