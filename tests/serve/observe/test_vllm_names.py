"""Metrics are also shown under vLLM's names, for dashboards that use these names."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dist_aclgraph.serve.observe.vllm_names import ALIASES
from tests.serve.conftest import serving

# Names of samples that vLLM's dashboards use. The dashboards are in vLLM's examples/observability.
ASKED = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
]


@pytest.fixture(scope="module")
def samples():
    with serving(**{"serve.vllm_metrics": True}) as service:
        service.openai.completions.create(model="tiny-qwen3", prompt=[5, 6, 7], max_tokens=7)
        text = service.http.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    return [sample for family in families for sample in family.samples]


@pytest.mark.parametrize("name", ASKED)
def test_metrics_of_vllms_boards_exist_with_the_name_of_the_model(samples, name):
    labels = [sample.labels for sample in samples if sample.name == name]

    assert labels and all(each["model_name"] == "tiny-qwen3" for each in labels)


def test_aliases_have_the_labels_and_values_of_our_metrics(samples):
    def by_name(name):
        return {
            tuple(sorted(s.labels.items())): s.value
            for s in samples
            if s.name.partition(name)[0] == "" and s.name.endswith(("_bucket", "_total", name))
        }

    for ours, theirs in ALIASES.items():
        own = by_name(f"dist_aclgraph_{ours}")
        assert own
        for name in theirs:
            assert by_name(f"vllm:{name}") == own


def test_lengths_of_requests_are_counted_when_they_end(samples):
    value = {s.name: s.value for s in samples if s.name.endswith("_sum")}

    assert value["vllm:request_generation_tokens_sum"] == 7
    assert value["vllm:request_prompt_tokens_sum"] == 3


def test_without_the_key_there_are_none(service):
    assert "vllm:" not in service.http.get("/metrics").text
