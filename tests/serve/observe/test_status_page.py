"""A headless browser shows the status page of a service with an engine whose numbers change."""

from __future__ import annotations

import contextlib
import threading
from urllib.parse import urlsplit

import pytest

from dist_aclgraph.actors.wire.messages import GroupEntry, GroupList
from dist_aclgraph.config import ServeConfig
from dist_aclgraph.serve.api import make_api
from dist_aclgraph.serve.http.access import read_access
from dist_aclgraph.serve.http.front import Front
from dist_aclgraph.serve.http.server import HttpServer, listen
from dist_aclgraph.serve.observe.metrics import ENGINE_METRICS
from tests.serve.browser import NOTHING, StatusPage, open_browser, rounding_of, value_of
from tests.serve.conftest import SILENT_S, serving
from tests.serve.fake_engine import FakeEngine
from tests.serve.http.test_access import KEY
from tests.serve.keys import write_keys
from tests.serve.scrape import scrape
from tests.serve.service.test_service import MODEL

RISING = {name for name, (kind, *_) in ENGINE_METRICS.items() if kind == "counter"}
PHONE = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2}


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        yield found


@contextlib.contextmanager
def shown(browser, service, **context):
    page = StatusPage(browser, f"{service.url}/", **context)
    try:
        page.wait_for_numbers()
        yield page
    finally:
        page.close()


@contextlib.contextmanager
def under_load(service, streams=4):
    """Within this context, ``streams`` threads send requests, one after another."""
    stop = threading.Event()

    def ask():
        while not stop.is_set():
            service.openai.completions.create(model=MODEL, prompt="abc", max_tokens=20)

    threads = [threading.Thread(target=ask) for _ in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def assert_equal(samples, scraped):
    for path, (unit, text) in samples.items():
        if text == NOTHING:
            assert path not in scraped
        else:
            assert value_of(unit, text) == pytest.approx(scraped[path], abs=rounding_of(unit)), path


def assert_in_between(samples, before, after):
    """Check that each counter on the page is between its values in the scrapes ``before`` and
    ``after``.
    """
    for path, (unit, text) in samples.items():
        if path[0] in RISING and text != NOTHING:
            slack = rounding_of(unit)
            low, high = before.get(path, 0.0) - slack, after[path] + slack
            assert low <= value_of(unit, text) <= high, path


@pytest.mark.slow
def test_numbers_under_load_lie_between_two_scrapes_and_then_equal_the_last(browser, own_service):
    with shown(browser, own_service) as page:
        with under_load(own_service):
            for _ in range(3):
                before = scrape(own_service)
                # the first numbers can be older than the scrape
                page.wait_for_numbers(2)
                samples = page.samples()
                assert_in_between(samples, before, scrape(own_service))
        page.wait_for_numbers(2)
        samples = page.samples()

        assert_equal(samples, scrape(own_service))
        assert samples["generation_tokens", "0"] != ("count", "60")  # 60 is the initial value
        assert samples["graph_replays", "0", "full decode 4"] == ("count", "7")
        assert samples["kv_cache_usage", "0"] == ("percent", "25.0 %")
        assert len(samples) > 30
        assert "[object" not in page.tab.inner_text("body")


@pytest.mark.slow
def test_charts_are_drawn_from_what_was_counted(browser, own_service):
    with under_load(own_service), shown(browser, own_service) as page:
        drawn = "document.querySelector('[data-chart={}] path').getAttribute('d').length > 5"
        for name in ("generation_tokens_per_s", "time_to_first_token_s_p50", "running"):
            page.wait_for(drawn.format(name))


def test_no_other_host_is_asked_and_nothing_is_complained_of(browser, service):
    with shown(browser, service) as page:
        page.wait_for_numbers()

        asked = {urlsplit(url).netloc for url in page.asked if not url.startswith("data:")}
        assert asked == {urlsplit(service.url).netloc}
        assert {urlsplit(url).path for url in page.asked if url.startswith("http")} == {
            "/",
            "/status.json",
        }
        assert page.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.slow
def test_a_phone_shows_it_without_scrolling_sideways_and_every_text_can_be_read(
    browser, service, scheme
):
    with shown(browser, service, color_scheme=scheme, **PHONE) as page:
        assert page.overflow_px() <= 0
        found = page.faint_texts()
        assert found["faint"] == []
        assert found["seen"] > 60
        ground = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(int(part) for part in ground[4:-1].split(",")[:3])
        assert (brightness > 3 * 128) == (scheme == "light")


@pytest.mark.slow
def test_the_page_shows_a_silent_engine_as_lost(browser, own_service):
    with shown(browser, own_service) as page:
        assert page.tab.inner_text("#state") == "1 of 1 group serves"
        own_service.engine.silent = True
        page.wait_for("document.getElementById('state').textContent === 'no group answers'")
        assert "lost" in page.tab.inner_text("[data-group='0']")
        assert page.complaints == []


@pytest.mark.slow
def test_groups_that_drain_or_are_lost_are_shown_beside_those_that_serve(browser):
    other = FakeEngine()
    with serving(other=other, link_s=SILENT_S) as service, shown(browser, service) as page:
        entries = (
            GroupEntry("0", service.engine.address, 100, 16),
            GroupEntry("7", other.address, 100, 16, is_draining=True),
        )
        service.engine.groups = other.groups = GroupList(1, entries)
        head = "document.querySelector(\"[data-group='7'] h2\")"
        page.wait_for(f"{head} !== null && {head}.textContent.includes('draining')")
        assert page.tab.inner_text("#state") == "1 of 2 groups serve"
        service.engine.groups = other.groups = GroupList(
            2, (entries[0], GroupEntry("7", other.address, 100, 16))
        )
        page.wait_for(f"{head}.textContent.includes('serving')")

        other.silent = True

        page.wait_for(f"{head}.textContent.includes('lost')")
        page.wait_for_numbers()
        assert "silent" in page.tab.inner_text("[data-group='7']")
        assert page.samples()["num_requests_running", "0"] == ("count", "2")
        assert page.complaints == []
    other.close()


@pytest.mark.slow
def test_a_service_that_is_gone_is_said_and_the_page_goes_on_asking(browser, own_service):
    with shown(browser, own_service) as page:
        page.tab.route("**/status.json", lambda route: route.abort())
        page.tab.wait_for_selector("#banner:not([hidden])", timeout=60_000)
        page.tab.unroute("**/status.json")
        page.tab.wait_for_selector("#banner", state="hidden", timeout=60_000)


def test_texts_of_the_service_are_never_markup(browser, own_service):
    own_service.engine.metrics["ranks"]["0"]["node"] = "<img src=x onerror=alert(1)>"

    with shown(browser, own_service) as page:
        assert "<img src=x onerror=alert(1)>" in page.tab.inner_text("[data-group='0']")
        assert page.tab.query_selector("img") is None


@pytest.mark.slow
def test_a_page_that_is_opened_during_the_start_says_so_and_shows_numbers_then(browser, service):
    front = Front("the service is starting")
    listener = listen("127.0.0.1", 0)
    server = HttpServer(service.state.config.serve, listener)
    server.start(front)
    page = StatusPage(browser, f"http://127.0.0.1:{listener.getsockname()[1]}/")
    page.tab.wait_for_selector("#banner:not([hidden])", timeout=60_000)
    assert page.tab.inner_text("#banner") == "No new numbers: the service is starting."

    front.open(make_api(service.state))

    page.wait_for_numbers()
    assert not page.tab.is_visible("#banner")
    page.close()
    server.stop()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    path = write_keys(tmp_path_factory.mktemp("keys") / "keys", KEY)
    access = read_access(ServeConfig(api_keys_file=str(path)), checks_host=True)
    with serving(access) as service:
        yield service


def test_the_key_is_asked_for_and_kept_in_the_tab_alone(browser, guarded):
    page = StatusPage(browser, f"{guarded.url}/")
    try:
        page.tab.wait_for_selector("#ask:not([hidden])", timeout=60_000)
        assert page.samples() == {}
        page.tab.fill("#key", "wrong")
        page.tab.click("button")
        page.tab.wait_for_selector("#banner:not([hidden])", timeout=60_000)
        assert "API key is missing or wrong" in page.tab.inner_text("#banner")

        page.tab.fill("#key", KEY)
        page.tab.click("button")
        page.wait_for_numbers(2)

        assert page.samples()["num_requests_running", "0"] == ("count", "2")
        assert not page.tab.is_visible("#ask")
        assert not page.tab.is_visible("#banner")
        assert page.tab.evaluate("localStorage.length + document.cookie.length") == 0
        assert page.tab.evaluate("location.href") == f"{guarded.url}/"
        page.tab.reload()
        page.wait_for_numbers()
    finally:
        page.close()
