"""Boards and alert rules in cluster/grafana use only metrics and labels that /metrics has."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import yaml

from tests.serve.board import (
    BOARDS,
    GRAFANA,
    alerts,
    board,
    labels_after,
    labels_of,
    promql_parser,
    unknown,
    unknown_in_alerts,
)

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
    # A counter with a label for a reason or a status is shown only after it has counted an event.
    shared_service.http.get("/no-such-path")
    shared_service.state.metrics.restarts_left({"controller": 6, "owner": 6})
    shared_service.openai.completions.create(model="tiny-qwen3", prompt="abc", max_tokens=4)
    return labels_of(shared_service.http.get("/metrics").text)


@pytest.mark.parametrize("name", BOARDS)
def test_every_metric_and_label_of_a_board_exists(known, name):
    assert unknown(name, known) == []


def test_every_metric_and_label_of_an_alert_exists(known):
    assert unknown_in_alerts(known) == []


def test_alerts_have_a_weight_and_say_what_to_do():
    names = [rule["alert"] for rule in alerts()]

    assert len(set(names)) == len(names) > 10
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(("check", "name"), [("rules", "alerts.yml"), ("config", "prometheus.yml")])
def test_promtool_finds_no_fault(check, name):
    done = subprocess.run(
        ["promtool", "check", check, name], cwd=GRAFANA, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_samples_cause_the_right_alerts():
    samples = GRAFANA.parents[1] / "tests" / "data" / "alerts_test.yml"
    done = subprocess.run(
        ["promtool", "test", "rules", samples.name],
        cwd=samples.parent,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr


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
        ("min by (rank) (dist_aclgraph_restarts_left) > 0.5", "rank"),
        ('label_replace(dist_aclgraph_rank_info, "a", "$1", "id", "(.*)")', "id"),
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


@pytest.mark.parametrize("name", BOARDS)
def test_panels_do_not_overlap_and_say_their_unit(name):
    taken = set()
    for panel in board(name)["panels"]:
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
    monitor = yaml.safe_load((GRAFANA.parent / "podmonitor.yaml").read_text())
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    [source] = yaml.safe_load(
        (GRAFANA / "provisioning" / "datasources" / "prometheus.yaml").read_text()
    )["datasources"]
    [provider] = yaml.safe_load(
        (GRAFANA / "provisioning" / "dashboards" / "dist_aclgraph.yaml").read_text()
    )["providers"]

    assert job["metrics_path"] == endpoint["path"] == "/metrics"
    assert endpoint["interval"] == scraped["global"]["scrape_interval"]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": job["job_name"]}]
    assert scraped["rule_files"] == ["alerts.yml"]
    assert source["type"] == "prometheus"
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]
    assert provider["type"] == "file" and provider["options"]["path"]
