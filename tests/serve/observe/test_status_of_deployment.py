"""The status page and the Grafana board show a real deployment of two groups with experts, drafts
and graphs.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import httpx
import pytest

from dist_aclgraph.config import load_config
from dist_aclgraph.serve.openai.state import open_state
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.deployments import start_deployment
from tests.serve.board import BOARDS, labels_of, unknown
from tests.serve.browser import StatusPage, open_browser
from tests.serve.conftest import open_port
from tests.serve.fake_engine import METRICS
from tests.serve.observe.test_status_page import assert_equal, assert_in_between
from tests.serve.scrape import leaves, scrape
from tests.serve.service.test_service import HI

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
STREAMS, REQUESTS = 6, 4


@pytest.fixture(scope="module")
def service(ray_cluster):
    config = load_config("configs/tiny-deepseek.yaml", {"parallel.ep": 2})
    running = start_deployment(config)
    try:
        state = open_state(config, Tokenizer(config.model), running.reach(), running.outlook)
        state.metrics.restarts_left({"controller": 6, "owner": 6})  # usually sent by the owner
        url, server = open_port(state)
        with httpx.Client(base_url=url, timeout=120) as http:
            yield SimpleNamespace(url=url, http=http)
        server.stop()
        state.client.close()
    finally:
        running.shut_down()


def ask(service):
    for _ in range(REQUESTS):
        body = {"model": "tiny-deepseek", "messages": HI, "max_tokens": 40, "ignore_eos": True}
        service.http.post("/v1/chat/completions", json=body).raise_for_status()


def test_numbers_on_the_page_are_those_of_the_metrics_under_load_and_after_it(service):
    threads = [threading.Thread(target=ask, args=[service]) for _ in range(STREAMS)]
    with open_browser() as browser:
        page = StatusPage(browser, f"{service.url}/")
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            before = scrape(service)
            page.wait_for_numbers(2)
            samples = page.samples()
            assert_in_between(samples, before, scrape(service))
        page.wait_for_numbers(2)

        samples = page.samples()
        assert_equal(samples, scrape(service))
        shown = {path[0] for path in samples}
        page.close()

    assert {
        "graph_replays",
        "padding_tokens",
        "eager_steps",
        "graph_streams_offered",
        "graph_streams_predicted",
        "graph_streams_measured",
        "kv_cache_usage",
        "spec_decode_num_accepted_tokens_per_pos",
        "expert_tokens",
    } <= shown
    for group, ranks in (("0", "01"), ("1", "23")):
        assert all(("expert_tokens", group, rank) in samples for rank in ranks)


def test_the_board_asks_for_what_a_deployment_has(service):
    ask(service)
    service.http.get("/no-such-path")

    known = labels_of(service.http.get("/metrics").text)
    # This metric has no sample before the first fault of a device.
    known["dist_aclgraph_resumptions_total"] = {"model_name", "replica", "engine", "fault"}
    assert [unknown(name, known) for name in BOARDS] == [[]] * len(BOARDS)


def test_the_engine_of_other_tests_answers_as_a_real_one_does(service):
    ask(service)
    names = {path[0] for path in leaves(service.http.get("/status.json").json()["metrics"])}
    known = {name for name in METRICS if name in names}

    not_metrics = {"graph", "steps", "ranks", "capture_seconds", "pool_bytes"}
    streams = {"streams_offered", "streams_predicted", "streams_measured"}
    until_it_happens = {"resumptions"}  # reported only after the first resumption
    # Engines report these values only if they keep copies of KV.
    with_files = {"kv_copied_blocks", "kv_copies_bytes", "kv_read_blocks"}
    assert METRICS.keys() - known == not_metrics | streams | until_it_happens | with_files
