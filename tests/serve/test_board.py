"""The Grafana board in cluster/grafana uses only metrics and labels that /metrics has."""

from __future__ import annotations

import pytest
import yaml

from tests.serve.board import GRAFANA, board, labels_after, labels_of, promql_parser, unknown

NEEDED = {
    "groups": "dist_aclgraph_group_state",
    "ranks and nodes": "dist_aclgraph_rank_info",
    "replays": "dist_aclgraph_graph_replays_total",
    "padding": "dist_aclgraph_padding_fraction",
    "eager steps": "dist_aclgraph_eager_steps_total",
    "streams offered": "dist_aclgraph_graph_streams_offered",
    "streams predicted": "dist_aclgraph_graph_streams_predicted",
    "streams measured": "dist_aclgraph_graph_streams_measured",
    "KV": "dist_aclgraph_kv_cache_usage_by_dp_rank",
    "tokens": "dist_aclgraph_generation_tokens_total",
    "first token": "dist_aclgraph_time_to_first_token_seconds_bucket",
    "between tokens": "dist_aclgraph_inter_token_latency_seconds_bucket",
    "drafts": "dist_aclgraph_spec_decode_num_accepted_tokens_per_pos_total",
    "experts": "dist_aclgraph_expert_tokens_total",
}


@pytest.fixture(scope="module")
def known(shared_service):
    # A counter by reason exists only after it has counted something.
    shared_service.openai.completions.create(model="tiny-qwen3", prompt="abc", max_tokens=4)
    return labels_of(shared_service.http.get("/metrics").text)


def test_every_metric_and_label_of_the_board_exists(known):
    assert unknown(known) == []


@pytest.mark.parametrize("what", NEEDED)
def test_the_board_shows_what_the_status_page_does(what):
    asked = [target["expr"] for panel in board()["panels"] for target in panel["targets"]]

    assert any(NEEDED[what] in expression for expression in asked)


@pytest.mark.parametrize(
    ("expression", "missing"),
    [
        ("dist_aclgraph_no_such_metric", "dist_aclgraph_no_such_metric"),
        ('dist_aclgraph_engine_healthy{engine="0"}', "engine"),
        ("max by (rank) (dist_aclgraph_kv_cache_usage)", "rank"),
        ("histogram_quantile(0.5, rate(dist_aclgraph_expert_tokens_total[1m]))", "le"),
        (
            "dist_aclgraph_expert_tokens_total / on (graph) dist_aclgraph_kv_cache_usage",
            "graph",
        ),
    ],
)
def test_the_check_finds_what_is_missing(known, expression, missing):
    with pytest.raises(KeyError, match=missing):
        labels_after(promql_parser.parse(expression), known)


def test_panels_do_not_overlap_and_say_their_unit():
    taken = set()
    for panel in board()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        assert panel["fieldConfig"]["defaults"]["unit"]
        taken |= cells


def test_the_files_beside_the_board_fit_each_other():
    scraped = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())
    [job] = scraped["scrape_configs"]
    [source] = yaml.safe_load(
        (GRAFANA / "provisioning" / "datasources" / "prometheus.yaml").read_text()
    )["datasources"]
    [provider] = yaml.safe_load(
        (GRAFANA / "provisioning" / "dashboards" / "dist_aclgraph.yaml").read_text()
    )["providers"]

    assert job["metrics_path"] == "/metrics"
    assert source["type"] == "prometheus"
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]
    assert provider["type"] == "file" and provider["options"]["path"]
