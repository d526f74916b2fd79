"""The service admits or refuses a request by three things: the API key, the header Host, and the
site of the web page that sent the request.
"""

from __future__ import annotations

import openai
import pytest

from dist_aclgraph.config import ServeConfig
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.serve.http.access import Access, read_access
from tests.serve.conftest import serving
from tests.serve.keys import write_keys
from tests.serve.openai.test_errors import CHAT, HI, MODEL, assert_error

KEY = "0123456789abcdef-key"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    write_keys(path, f"# ours\n\nanother-key-of-someone\n{KEY}\n")
    access = read_access(ServeConfig(api_keys_file=str(path)), checks_host=True)
    with serving(access) as service:
        yield service


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "//v1/models",
        "/metrics",
        "/metrics/",
        "//metrics",
        "/version",
        "/openapi.json",
    ],
)
def test_every_path_needs_a_key(guarded, path):
    url = f"{guarded.url}{path}"  # httpx would read a path that begins with // as a host
    reply = guarded.http.get(url)

    assert assert_error(reply, 401)["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"] == "Bearer"
    headers = {"Authorization": f"Bearer {KEY}"}
    assert guarded.http.get(url, headers=headers).status_code == 200


def test_probes_need_none(guarded):
    assert guarded.http.get("/health").status_code == 200
    assert guarded.http.get("/ready").status_code == 200


@pytest.mark.parametrize("given", [f"Bearer {KEY}x", f"Basic {KEY}", KEY, f"Bearer {KEY[:-1]}"])
def test_another_key_is_refused(guarded, given):
    assert_error(guarded.http.get("/v1/models", headers={"Authorization": given}), 401)


def test_the_sdk_brings_the_key_along(guarded):
    guarded.answer("a")
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY)

    reply = client.chat.completions.create(model=MODEL, messages=HI)

    assert reply.choices[0].message.content == "a"
    with pytest.raises(openai.AuthenticationError):
        guarded.openai.models.list()


def test_no_object_that_is_kept_contains_a_key(guarded):
    access = read_access(ServeConfig(), checks_host=True)

    assert access.keys is None
    assert KEY not in repr(guarded.__dict__)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_a_body_that_a_form_could_send_is_refused(service, kind):
    body = b'{"model": "tiny-qwen3", "messages": [{"role": "user", "content": "x"}]}'

    reply = service.http.post(CHAT, content=body, headers={"Content-Type": kind})

    assert "application/json" in assert_error(reply, 415)["message"]
    assert service.engine.submitted == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_pages_of_other_sites_are_refused(service, headers):
    reply = service.http.post(CHAT, json={"model": MODEL, "messages": HI}, headers=headers)

    assert_error(reply, 403)
    assert service.engine.submitted == []


def test_a_page_of_this_site_may_ask(service):
    service.answer("a")
    headers = {"Origin": service.url, "Content-Type": "application/json; charset=utf-8"}

    reply = service.http.post(CHAT, json={"model": MODEL, "messages": HI}, headers=headers)

    assert reply.status_code == 200


def test_a_foreign_name_that_points_to_loopback_is_refused():
    access = read_access(ServeConfig(allowed_hosts=("mine.local",)), checks_host=True)

    upstream = b"dist_aclgraph"  # by default, nginx sends its name for the upstream server as Host
    for host in (b"localhost:8000", b"127.0.0.1", b"[::1]:8000", b"MINE.local:80", upstream):
        access.authorize("GET", "/v1/models", {b"host": host})
    for host in (b"evil.example", b"localhost.evil.example:8000"):
        with pytest.raises(Exception, match="not known as"):
            access.authorize("GET", "/health", {b"host": host})


def test_a_name_is_no_matter_where_a_key_is_wanted_or_all_names_are_allowed(monkeypatch):
    open_to_all = read_access(ServeConfig(allowed_hosts=("*",)), checks_host=True)
    monkeypatch.setenv("DIST_ACLGRAPH_API_KEY", KEY)
    guarded = read_access(ServeConfig(), checks_host=True)

    open_to_all.authorize("GET", "/v1/models", {b"host": b"api.example.com"})
    guarded.authorize("GET", "/health", {b"host": b"api.example.com"})


def test_a_key_may_come_as_x_api_key(guarded):
    assert guarded.http.get("/v1/models", headers={"X-API-Key": KEY}).status_code == 200
    assert_error(guarded.http.get("/v1/models", headers={"X-API-Key": f"{KEY}x"}), 401)


def test_the_openapi_document_says_where_a_key_goes(guarded, service):
    document = guarded.http.get("/openapi.json", headers={"X-API-Key": KEY}).json()

    assert set(document["components"]["securitySchemes"]) == {"bearer", "x_api_key"}
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "security" not in document["paths"]["/v1/models"]["get"]
    assert "security" not in service.http.get("/openapi.json").json()


def test_an_encoded_body_is_refused(service):
    body = b'{"model": "tiny-qwen3", "messages": [{"role": "user", "content": "x"}]}'

    reply = service.http.post(CHAT, content=body, headers={"Content-Encoding": "gzip"})

    assert "Content-Encoding gzip" in assert_error(reply, 415)["message"]


ORIGIN = "https://chat.example.com"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize("allowed", [ORIGIN, "*"])
def test_a_page_of_an_allowed_origin_may_ask(allowed):
    access = read_access(ServeConfig(allowed_origins=(allowed,)), checks_host=True)
    sent = {"Origin": ORIGIN, "Sec-Fetch-Site": "cross-site"}

    with serving(access) as service:
        asked = service.http.options(CHAT, headers={**sent, **PREFLIGHT})
        reply = service.http.post(CHAT, json={"model": MODEL, "messages": HI}, headers=sent)
        wrong = service.http.post(CHAT, json={"model": MODEL}, headers=sent)

    assert asked.status_code == 204
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert reply.status_code == 200
    assert wrong.status_code == 400
    for answer in (asked, reply, wrong):
        assert answer.headers["access-control-allow-origin"] == allowed
        assert "x-ignored-parameters" in answer.headers["access-control-expose-headers"]


def test_a_page_of_another_origin_learns_that_it_may_not_ask(service):
    headers = {"Origin": "https://evil.example", **PREFLIGHT}

    reply = service.http.options(CHAT, headers=headers)

    assert "serve.allowed_origins" in assert_error(reply, 403)["message"]
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        (CHAT, "OPTIONS, POST"),
        ("/v1/models/a/b", "GET, HEAD, OPTIONS"),
        ("/openapi.json", "GET, HEAD, OPTIONS"),
        ("/unknown", "GET, HEAD, OPTIONS, POST"),
    ],
)
def test_the_answer_to_options_lists_the_methods_of_the_path(service, path, methods):
    reply = service.http.options(path)

    assert reply.status_code == 204
    assert reply.headers["allow"] == methods


def test_a_page_of_this_site_may_ask_through_a_proxy_that_changes_the_host(service):
    service.answer("a")
    headers = {"Origin": ORIGIN, "Sec-Fetch-Site": "same-origin", "Host": "upstream"}

    reply = service.http.post(CHAT, json={"model": MODEL, "messages": HI}, headers=headers)

    assert reply.status_code == 200


def test_beyond_loopback_there_is_a_key_or_a_word_about_it(monkeypatch):
    with pytest.raises(ConfigError, match=r"serve\.host is 0\.0\.0\.0.*serve\.insecure=true"):
        read_access(ServeConfig(host="0.0.0.0"), checks_host=True)

    assert read_access(ServeConfig(host="0.0.0.0", insecure=True), checks_host=True) == Access()
    monkeypatch.setenv("DIST_ACLGRAPH_API_KEY", KEY)
    assert read_access(ServeConfig(host="0.0.0.0"), checks_host=True).keys
