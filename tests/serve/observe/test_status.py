"""The status page and its numbers: who may read them, what they cost, and their values."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dist_aclgraph.config import ServeConfig
from dist_aclgraph.serve.http.access import read_access
from dist_aclgraph.serve.observe.history import PERIOD_S
from dist_aclgraph.serve.observe.status import MAX_AGE_S
from tests.serve.conftest import serving, until
from tests.serve.http.test_access import KEY
from tests.serve.keys import write_keys
from tests.serve.scrape import leaves, scrape
from tests.serve.service.test_service import HI, MODEL


def numbers(service):
    return service.http.get("/status.json").json()


def test_the_numbers_are_those_of_the_metrics(own_service):
    own_service.openai.completions.create(model=MODEL, prompt="abc", max_tokens=4)

    shown = leaves(numbers(own_service)["metrics"])

    scraped = scrape(own_service)
    # The memory and the open files of the ingress change between the two reads.
    changing = {path for path in shown if path[0].startswith("ingress_")}
    # The page's numbers contain no histograms. Only the page's history uses them.
    assert {path: shown[path] for path in shown.keys() - changing} == {
        path: scraped[path] for path in shown.keys() - changing
    }
    assert set(scraped) - set(shown) == {path for path in scraped if "/le=" in path[0]}
    assert shown["graph_replays", "0", "full decode 4"] == 7
    assert shown["request_success", "length"] == 1


def test_refused_requests_are_counted_by_status_and_the_start_is_told(own_service):
    own_service.http.post("/v1/completions", json={"model": "another", "prompt": "x"})
    own_service.http.get("/nowhere")
    until(lambda: own_service.state.slots.taken == 0)  # the service releases slots after the answer
    own_service.state.slots.acquire(own_service.state.slots.total)
    own_service.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})

    found = numbers(own_service)["metrics"]

    assert found["refused_requests"] == {"404": 2.0, "503": 1.0}
    assert abs(time.time() - found["start_time_seconds"]) < 600


def test_ranks_have_their_node_and_npus(service):
    ranks = numbers(service)["metrics"]["rank_info"]["0"]

    assert ranks["1"] == {"node": "node-b", "npus": "3", "kind": "emulated"}


def test_rates_and_latencies_come_with_the_second_look(own_service):
    own_service.engine.step_s = 0.05

    def series(name):
        own_service.openai.completions.create(model=MODEL, prompt="abc", max_tokens=4)
        found = numbers(own_service)["history"]["series"].get(name, [])
        return [value for value in found if value]

    until(lambda: series("generation_tokens_per_s"))
    until(lambda: series("time_to_first_token_s_p50"))
    until(lambda: series("inter_token_latency_s_p95"))


def test_the_page_needs_no_key_and_holds_no_secret_but_its_numbers_need_one(tmp_path):
    with serving(read_access_with_key(tmp_path)) as service:
        page = service.http.get("/")

        assert page.status_code == 200
        assert MODEL not in page.text and KEY not in page.text
        assert service.http.get("/status.json").status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        assert service.http.get("/status.json", headers=headers).status_code == 200


def read_access_with_key(tmp_path):
    path = write_keys(tmp_path / "keys", KEY)
    return read_access(ServeConfig(api_keys_file=str(path)), checks_host=True)


def test_the_page_is_one_file_that_asks_no_other_host(service):
    page = service.http.get("/")

    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert policy.count("sha256-") == 2  # hashes of the page's script and style
    links = re.findall(r"""(?:src|href|action)=["']([^"']*)""", page.text)
    assert links == ["data:,"]
    assert "@import" not in page.text and "url(" not in page.text
    assert re.findall(r"https?://[^\"]*", page.text) == [
        "http://www.w3.org/2000/svg"  # this is the name of a namespace, which no browser loads
    ]


def test_many_pages_ask_the_engine_as_often_as_one(own_service):
    asked = []
    collect = own_service.state.metrics.collect
    slow = threading.Event()

    def counted():
        asked.append(1)
        slow.wait(0.2)
        return collect()

    own_service.state.status = type(own_service.state.status)(
        MODEL, CountedMetrics(own_service.state.metrics, counted), own_service.state.client
    )
    began_s = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: own_service.http.get("/status.json"), range(64)))

    assert {reply.status_code for reply in replies} == {200}
    elapsed_s = time.monotonic() - began_s
    of_the_history = 1 + elapsed_s / PERIOD_S
    assert len(asked) <= 1 + elapsed_s / MAX_AGE_S + of_the_history


class CountedMetrics:
    """Metrics whose method ``collect`` is a function of the test."""

    def __init__(self, metrics, collect):
        self.replica = metrics.replica
        self.collect = collect


def test_a_dead_engine_leaves_a_page_that_says_so(own_service):
    own_service.engine.silent = True
    until(lambda: own_service.http.get("/health").status_code == 503)

    answer = numbers(own_service)

    assert answer["metrics"]["engine_healthy"] == 0
    assert answer["metrics"]["group_state"] == {"0": {"lost": 1}}
    assert "0" in answer["lost"]


@pytest.mark.parametrize("path", ["/", "/status.json"])
def test_a_draining_service_still_shows_its_status(own_service, path):
    own_service.state.is_draining = True

    assert own_service.http.get(path).status_code == 200


def test_a_chat_continues_while_status_pages_are_read(service):
    service.answer("a b c")
    stop = threading.Event()

    def poll():
        while not stop.is_set():
            assert service.http.get("/status.json").status_code == 200

    with ThreadPoolExecutor(2) as pool:
        polls = [pool.submit(poll) for _ in range(2)]
        reply = service.openai.chat.completions.create(model=MODEL, messages=HI)
        stop.set()
        for each in polls:
            each.result()

    assert reply.choices[0].message.content == "a b c"
