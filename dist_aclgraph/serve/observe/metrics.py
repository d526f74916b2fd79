"""Prometheus metrics of the ingress, and of the engines, which the ingress queries.

The engine's answer to ``Query("metrics")`` is one JSON object. ``ENGINE_METRICS`` says where each
metric's value is in this object. If a metric's value is an object, each entry of the value becomes
one sample. ``ENGINE_METRICS`` names a label for the samples; the entry's key is the label's value.
"""

from __future__ import annotations

import os
import resource
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.host import processes
from dist_aclgraph.errors import EngineDeadError
from dist_aclgraph.serve.observe.frequent import FrequentHistogram
from dist_aclgraph.serve.observe.vllm_names import vllm_names

PREFIX = "dist_aclgraph_"
LABELS = ("model_name", "replica")  # every metric has these labels
_PATHS = {
    "graph_replays": ("graph", "replays"),
    "eager_steps": ("graph", "misses"),
    "padding_tokens": ("graph", "padded_by_graph"),
    "padding_fraction": ("graph", "wasted_by_graph"),
    "graph_plan_version": ("graph", "plan_version"),
    "graph_capture_seconds": ("capture_seconds",),
    "graph_pool_bytes": ("pool_bytes",),
    "graph_streams_offered": ("streams_offered",),
    "graph_streams_predicted": ("streams_predicted",),
    "graph_streams_measured": ("streams_measured",),
}
# Maps the name of each metric to its kind, the name of the label for an object's keys, and the help
# text. In the engine's answer, the key of a value is the metric's name, unless _PATHS contains
# another path.
ENGINE_METRICS: dict[str, tuple[str, str, str]] = {
    "num_requests_running": ("gauge", "", "Requests in the running batch."),
    "num_requests_waiting": ("gauge", "", "Requests that wait to run."),
    "num_requests_running_by_dp_rank": (
        "gauge",
        "dp_rank",
        "Requests in the running batch of a data-parallel rank of the engine.",
    ),
    "kv_cache_usage": ("gauge", "", "Share of KV blocks in use, 0 to 1."),
    "kv_cache_usage_by_dp_rank": ("gauge", "dp_rank", "Share of its KV blocks in use, 0 to 1."),
    "num_preemptions": ("counter", "", "Requests that gave their blocks back."),
    "prompt_tokens": ("counter", "", "Prompt tokens computed or found in the prefix cache."),
    "generation_tokens": ("counter", "", "Tokens generated."),
    "prefix_cache_queries": ("counter", "", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("counter", "", "Prompt tokens found in the prefix cache."),
    "kv_copied_blocks": (
        "counter",
        "outcome",
        "KV blocks saved to files or not (unsaved), and loaded from files or not (missed).",
    ),
    "kv_read_blocks": ("counter", "tier", "KV blocks that an engine has read from files, by tier."),
    "kv_late_look_ups": ("counter", "", "Look-ups of KV files that kv.disk answered too late."),
    "kv_fetched_blocks": ("counter", "", "KV blocks fetched from groups on other nodes."),
    "kv_fetched_bytes": ("counter", "", "Bytes of files fetched from groups on other nodes."),
    "kv_failed_fetches": ("counter", "", "Fetches from a silent source, and too late ones."),
    "kv_copies_bytes": ("gauge", "tier", "Bytes of KV files on the engine's node, by tier."),
    "spec_decode_num_drafts": ("counter", "", "Times that a request's drafts were verified."),
    "spec_decode_num_draft_tokens": ("counter", "", "Draft tokens that were verified."),
    "spec_decode_num_accepted_tokens": ("counter", "", "Draft tokens that were accepted."),
    "spec_decode_num_accepted_tokens_per_pos": (
        "counter",
        "position",
        "Draft tokens that were accepted, by their position in the draft.",
    ),
    "expert_tokens": ("counter", "rank", "Tokens that a rank's experts have computed."),
    "step_reruns": ("counter", "", "Steps run again, as tokens found no room at their experts."),
    "non_finite_requests": (
        "counter",
        "",
        "Requests that ended with an error, as the model computed NaN or infinity for them.",
    ),
    "resumptions": (
        "counter",
        "fault",
        "Times that a group came back with its graphs from a failed device or link, and with its "
        "KV unless that was lost (uce_kv).",
    ),
    "graph_replays": ("counter", "graph", "Steps that replayed a captured graph."),
    "eager_steps": ("counter", "reason", "Steps that ran without a graph, by reason."),
    "padding_tokens": ("counter", "graph", "Padding tokens computed, by graph."),
    "padding_fraction": ("gauge", "graph", "Share of a graph's tokens that was padding, 0 to 1."),
    "graph_plan_version": ("gauge", "", "Version of the graph plan that holds."),
    "graph_capture_seconds": ("gauge", "graph", "How long the capture of a graph took."),
    "graph_pool_bytes": ("gauge", "", "Device memory that all captured graphs share."),
    "weight_bytes": ("gauge", "", "Device memory that the weights of a rank take."),
    "memory_offered_bytes": (
        "gauge",
        "rank",
        "Device memory of a rank for KV blocks and graphs: beside weights and eager steps.",
    ),
    "graph_streams_offered": ("gauge", "rank", "Streams that a rank offered for graphs."),
    "graph_streams_predicted": ("gauge", "rank", "Streams that the first plan was to take."),
    "graph_streams_measured": ("gauge", "rank", "Streams that it took."),
    "group_start_time_seconds": ("gauge", "", "When the group began to serve, since 1970."),
    "restarts_left": (
        "gauge",
        "",
        "How many lost groups may still be started again within this hour "
        "(recovery.restarts_per_hour).",
    ),
    "process_resident_memory_bytes": (
        "gauge",
        "process",
        "Resident memory of the engine, and of each worker on the engine's host.",
    ),
    "process_open_fds": ("gauge", "process", "Files that the engine has open."),
    "host_memory_bytes": ("gauge", "host", "Memory of the engine's host."),
    "host_memory_available_bytes": (
        "gauge",
        "host",
        "Memory of the engine's host that programs can still get.",
    ),
}
RANK_LABELS = ("rank", "node", "npus", "kind")
# The requests and tokens that this replica has sent to each engine.
ROUTING_METRICS = {
    "routed_requests": "Requests that this replica sent to an engine.",
    "routed_prompt_tokens": "Prompt tokens of those requests.",
    "routed_cached_tokens": "Those of them that the engine was taken to have in its cache.",
}
# Gauges of this process. The values are the help text, and a function that reads the number.
INGRESS_GAUGES: dict[str, tuple[str, Callable[[], float]]] = {
    "ingress_resident_memory_bytes": (
        "Resident memory of this replica's process.",
        lambda: processes.resident_bytes(os.getpid()),
    ),
    "ingress_open_fds": (
        "Files and connections that this replica's process has open.",
        lambda: processes.count_open_files(os.getpid()),
    ),
    "ingress_max_fds": (
        "How many files and connections this replica's process may have open.",
        lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    ),
}
_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_BUCKETS = tuple(float(n * 10**k) for k in range(6) for n in (1, 2, 5))
_E2E_BUCKETS = (*_LATENCY_BUCKETS, 120.0, 300.0, 600.0)


class Metrics:
    """Owns this replica's registry and histograms.

    Args:
        has_aliases: whether metrics are also exposed under vLLM's names.
    """

    def __init__(self, model_name: str, client: EngineClient, *, has_aliases: bool = False) -> None:
        self._registry = CollectorRegistry()
        # Replicas share one address, so two scrapes may be answered by different replicas. The
        # label ``replica`` separates the counters of the replicas, so that no counter seems to
        # fall.
        values = (model_name, secrets.token_hex(4))

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(
                f"{PREFIX}{name}", text, LABELS, registry=self._registry, buckets=buckets
            )
            return made.labels(*values)

        self._ttft = histogram(
            "time_to_first_token_seconds", "From submission to the first token.", _LATENCY_BUCKETS
        )
        self._itl = FrequentHistogram(
            f"{PREFIX}inter_token_latency_seconds",
            "Between two deliveries of tokens to one request.",
            dict(zip(LABELS, values, strict=True)),
            _LATENCY_BUCKETS,
        )
        self._registry.register(self._itl)
        self._e2e = histogram(
            "e2e_request_latency_seconds", "From submission to the end of a request.", _E2E_BUCKETS
        )
        self._prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a request that has ended.", _TOKEN_BUCKETS
        )
        self._generation_tokens = histogram(
            "request_generation_tokens",
            "Tokens generated for a request that has ended.",
            _TOKEN_BUCKETS,
        )
        self._finished = Counter(
            f"{PREFIX}request_success",
            "Requests that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._refused = Counter(
            f"{PREFIX}refused_requests",
            "Requests that were answered with an HTTP error, by status.",
            (*LABELS, "status"),
            registry=self._registry,
        )
        self._restarts_left = Gauge(
            f"{PREFIX}service_restarts_left",
            "How many lost controllers and owners of the deployment may still be replaced within "
            "this hour (recovery.restarts_per_hour).",
            (*LABELS, "of"),
            registry=self._registry,
        )
        start = Gauge(
            f"{PREFIX}start_time_seconds",
            "When this replica started, in seconds since 1970.",
            LABELS,
            registry=self._registry,
        )
        start.labels(*values).set(time.time())
        self._values = values
        self._has_aliases = has_aliases
        self._registry.register(_EngineCollector(values, client))
        for name, (text, read) in INGRESS_GAUGES.items():
            self.track(name, text, read)

    def track(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge. At every scrape, ``read`` is called, on any thread, to get the gauge's
        value.
        """
        gauge = Gauge(f"{PREFIX}{name}", text, LABELS, registry=self._registry)
        gauge.labels(*self._values).set_function(read)

    def restarts_left(self, left: Mapping[str, int]) -> None:
        """Store, for each kind of process of the deployment, how many processes may still be
        replaced.
        """
        for kind, count in left.items():
            self._restarts_left.labels(*self._values, kind).set(count)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float) -> None:
        self._itl.observe(seconds)

    def finished(
        self, reason: str, seconds: float, *, num_prompt_tokens: int, num_tokens: int
    ) -> None:
        self._e2e.observe(seconds)
        self._prompt_tokens.observe(num_prompt_tokens)
        self._generation_tokens.observe(num_tokens)
        self._finished.labels(*self._values, reason).inc()

    def refused(self, status: int) -> None:
        self._refused.labels(*self._values, str(status)).inc()

    @property
    def replica(self) -> str:
        """The value of the label ``replica``."""
        return self._values[1]

    def collect(self) -> list[Metric]:
        """Return the current values of all metrics; waits for the engines' answers."""
        return list(self._registry.collect())

    def expose(self) -> bytes:
        """Return all metrics as Prometheus text; waits for the engines' answers."""
        found = self.collect()
        if self._has_aliases:
            found += vllm_names(found)
        return bytes(generate_latest(_Collected(found)))


class _Collected(CollectorRegistry):
    """Gives collected metrics to the library, which writes the metrics as text."""

    def __init__(self, found: list[Metric]) -> None:
        super().__init__()
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


class _EngineCollector(Collector):
    """Asks the engines at every scrape; the label ``engine`` names the lockstep group."""

    def __init__(self, values: tuple[str, ...], client: EngineClient) -> None:
        self._values = values
        self._client = client

    def describe(self) -> list[Metric]:
        return []  # registering the collector must not query the engines

    def collect(self) -> Iterator[Metric]:
        try:
            answers = self._client.query("metrics", timeout_s=2.0)
        except EngineDeadError:
            answers = {}
        healthy = GaugeMetricFamily(
            f"{PREFIX}engine_healthy", "1 while an engine answers.", labels=LABELS
        )
        healthy.add_metric(self._values, 1.0 if answers else 0.0)
        yield healthy
        for key, (kind, label, text) in ENGINE_METRICS.items():
            labels = (*LABELS, "engine", *((label,) if label else ()))
            family = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
            metric = family(PREFIX + key, text, labels=labels)
            for engine, answered in answers.items():
                for sample, value in _samples(_find(answered, key)):
                    metric.add_metric((*self._values, engine, *sample), value)
            yield metric
        yield self._ranks(answers)
        yield self._answered(answers)
        yield from self._ingress()

    def _answered(self, answers: dict[str, dict[str, Any]]) -> Metric:
        metric = GaugeMetricFamily(
            f"{PREFIX}engine_answered",
            "1 where an engine has answered this scrape; 0 where its samples are missing.",
            labels=(*LABELS, "engine"),
        )
        for engine in self._client.states().keys() | answers.keys():
            metric.add_metric((*self._values, engine), float(engine in answers))
        return metric

    def _ingress(self) -> Iterator[Metric]:
        """Yield the metrics that are counted by this replica, and not by an engine."""
        client, values = self._client, self._values
        routed = client.routed()
        for key, text in ROUTING_METRICS.items():
            counter = CounterMetricFamily(PREFIX + key, text, labels=(*LABELS, "engine"))
            for engine, counts in routed.items():
                counter.add_metric((*values, engine), asdict(counts)[key])
            yield counter
        resumed = CounterMetricFamily(
            f"{PREFIX}resumed_requests",
            "Requests that went on in another group, as theirs was lost.",
            labels=LABELS,
        )
        resumed.add_metric(values, client.num_resumed)
        yield resumed
        held = GaugeMetricFamily(
            f"{PREFIX}held_requests", "Requests that wait for a group to serve.", labels=LABELS
        )
        held.add_metric(values, client.num_held)
        yield held
        outage = CounterMetricFamily(
            f"{PREFIX}outage_seconds", "How long no group took requests, in all.", labels=LABELS
        )
        outage.add_metric(values, client.outage_seconds())
        yield outage
        losses = CounterMetricFamily(
            f"{PREFIX}group_losses",
            "Groups that this replica has lost, by what it has seen of it; the end of a group that "
            "has drained is no loss.",
            labels=(*LABELS, "kind"),
        )
        for kind, count in client.num_losses().items():
            losses.add_metric((*values, kind), count)
        yield losses
        groups = GaugeMetricFamily(
            f"{PREFIX}groups", "Lockstep groups, by what they do.", labels=(*LABELS, "state")
        )
        for state, count in client.capacity().by_state().items():
            groups.add_metric((*values, state), count)
        yield groups
        states = GaugeMetricFamily(
            f"{PREFIX}group_state", "1 for what a group does.", labels=(*LABELS, "engine", "state")
        )
        for engine, state in client.states().items():
            states.add_metric((*values, engine, state), 1.0)
        yield states

    def _ranks(self, answers: dict[str, dict[str, Any]]) -> Metric:
        metric = GaugeMetricFamily(
            f"{PREFIX}rank_info",
            "1 for each rank of a serving engine, with its node and its NPUs.",
            labels=(*LABELS, "engine", *RANK_LABELS),
        )
        for engine, answered in answers.items():
            for rank, place in answered.get("ranks", {}).items():
                named = (rank, *(place[label] for label in RANK_LABELS[1:]))
                metric.add_metric((*self._values, engine, *named), 1.0)
        return metric


def _find(answer: dict[str, Any], key: str) -> Any:
    found: Any = answer
    for part in _PATHS.get(key, (key,)):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _samples(value: Any) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(value, dict):
        for name, number in value.items():
            yield (str(name),), float(number)
    elif isinstance(value, int | float):
        yield (), float(value)
