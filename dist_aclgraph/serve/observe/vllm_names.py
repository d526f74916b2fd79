"""Copies our metrics to the names that vLLM's dashboards use (``serve.vllm_metrics``).

A metric has an alias only if a metric of vLLM has the same meaning.
``vllm:request_queue_time_seconds``, ``vllm:request_prefill_time_seconds``,
``vllm:request_decode_time_seconds`` and ``vllm:request_max_num_generation_tokens`` do not exist,
because this service does not measure these values.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

OURS, THEIRS = "dist_aclgraph_", "vllm:"
# The keys are our names. The values are vLLM's names, with older names last.
ALIASES: dict[str, tuple[str, ...]] = {
    "num_requests_running": ("num_requests_running",),
    "num_requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "num_preemptions": ("num_preemptions",),
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
    "prefix_cache_queries": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "prefix_cache_hits": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "spec_decode_num_drafts": ("spec_decode_num_drafts",),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens",),
    "spec_decode_num_accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "spec_decode_num_accepted_tokens_per_pos": ("spec_decode_num_accepted_tokens_per_pos",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generation_tokens": ("request_generation_tokens",),
    "request_success": ("request_success",),
}


def vllm_names(found: Iterable[Metric]) -> list[Metric]:
    """Return copies of metrics under vLLM's names; labels and values are the same."""
    return [
        _renamed(metric, THEIRS + name)
        for metric in found
        for name in ALIASES.get(metric.name.removeprefix(OURS), ())
    ]


def _renamed(metric: Metric, name: str) -> Metric:
    alias = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        renamed = name + sample.name.removeprefix(metric.name)
        alias.samples.append(Sample(renamed, sample.labels, sample.value))
    return alias
