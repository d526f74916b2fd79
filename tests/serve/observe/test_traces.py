"""With traces, each request gives a span with its tokens and its outcome, and a child span for each
phase.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from dist_aclgraph.errors import MissingPackageError
from dist_aclgraph.extras import require
from dist_aclgraph.serve.observe import traces
from tests.serve.conftest import Service, serving, until
from tests.serve.openai.test_errors import CHAT, HI, MODEL

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is missing")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PREFILL_S = 1e-6  # far less than the time from the submission to the first token
BODY = {"model": MODEL, "messages": HI, "max_tokens": 3}


class Spans:
    def __init__(self, service: Service) -> None:
        self.service = service
        self._exporter = InMemorySpanExporter()
        service.state.traces = traces.Traces("http://none", MODEL, self._exporter)

    def finished(self) -> list[Any]:
        assert self.service.state.traces is not None
        self.service.state.traces._provider.force_flush()
        return list(self._exporter.get_finished_spans())

    def the_one(self) -> Any:
        """Return the span of the only request."""
        [span] = [span for span in self.all() if span.kind is SpanKind.SERVER]
        return span

    def all(self) -> list[Any]:
        until(lambda: any(span.kind is SpanKind.SERVER for span in self.finished()))
        return self.finished()

    def phases(self) -> list[Any]:
        """Return the child spans of the only request's span, in the order of their beginning."""
        parent = self.the_one().context
        children = [span for span in self.all() if span.kind is SpanKind.INTERNAL]
        assert all(child.parent == parent for child in children)
        return sorted(children, key=lambda span: span.start_time)


@pytest.fixture
def spans(service: Service) -> Iterator[Spans]:
    yield Spans(service)
    service.state.traces.close()
    service.state.traces = None


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_has_phases_tokens_and_the_parent_of_its_caller(spans: Spans, stream: bool) -> None:
    spans.service.engine.prefill_s = PREFILL_S
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    body = BODY | {"stream": stream}

    spans.service.http.post(CHAT, json=body, headers=headers)

    span = spans.the_one()
    assert span.name == f"POST {CHAT}"
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    phases = spans.phases()
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    ends = [end for phase in phases for end in (phase.start_time, phase.end_time)]
    assert [span.start_time, *ends, span.end_time] == sorted(
        [span.start_time, *ends, span.end_time]
    )
    assert ends[1::2][:-1] == ends[2::2] and ends[-1] == span.end_time
    assert ends[3] - ends[2] == pytest.approx(PREFILL_S * 1e9, abs=2)
    found = dict(span.attributes)
    assert found["gen_ai.request.model"] == MODEL
    assert found["gen_ai.usage.output_tokens"] == 3 and found["gen_ai.usage.input_tokens"] > 0
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert found["http.response.status_code"] == 200
    assert found["dist_aclgraph.request_id"] == "mine"
    assert span.status.is_unset


def test_a_failed_request_has_an_error(spans: Spans) -> None:
    spans.service.engine.fail_after = 1, "ReplayMismatchError"

    spans.service.http.post(CHAT, json=BODY)

    span = spans.the_one()
    assert not span.status.is_ok and not span.status.is_unset
    assert span.attributes["error.type"] == "ReplayMismatchError"


def test_a_refused_request_has_a_span_without_phases(spans: Spans) -> None:
    spans.service.http.post(CHAT, json=BODY | {"model": "other"})

    span = spans.the_one()
    assert not spans.phases()
    assert span.attributes["http.response.status_code"] == 404


def test_unsampled_requests_and_requests_for_metrics_have_no_span(spans: Spans) -> None:
    not_sampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}

    spans.service.http.post(CHAT, json=BODY, headers=not_sampled)
    spans.service.http.get("/metrics")
    spans.service.http.post(CHAT, json=BODY, headers={"X-Request-Id": "last"})

    assert spans.the_one().attributes["dist_aclgraph.request_id"] == "last"


class Collector(HTTPServer):
    """A collector of traces, which receives OTLP over HTTP."""

    def __init__(self) -> None:
        self.received: list[ExportTraceServiceRequest] = []
        super().__init__(("127.0.0.1", 0), CollectorHandler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        self.server.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def test_a_collector_gets_the_spans_that_wait_at_the_end() -> None:
    collector = Collector()
    with serving(**{"serve.traces": collector.url}) as service:
        service.http.post(CHAT, json=BODY)
        service.state.close()

    [export] = collector.received
    [resource] = export.resource_spans
    names = {span.name for span in resource.scope_spans[0].spans}
    assert names == {f"POST {CHAT}", "queue and prefill", "decode"}
    named = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert named["service.name"] == "dist_aclgraph"
    collector.shutdown()
    collector.server_close()


def test_a_collector_that_is_away_does_not_delay_requests() -> None:
    with serving(**{"serve.traces": "http://127.0.0.1:9/v1/traces"}) as service:
        for _ in range(3):
            assert service.http.post(CHAT, json=BODY).status_code == 200
        assert httpx.get(f"{service.url}/health").status_code == 200


def test_without_traces_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "from dist_aclgraph.cli.ingress import serve_http; import sys\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_a_missing_package_names_its_extra() -> None:
    with pytest.raises(MissingPackageError, match=r"pip install 'dist-aclgraph\[otel\]'"):
        require("opentelemetry_of_nobody.exporter", "otel", "serve.traces")
