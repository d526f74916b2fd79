"""The file of API keys: its lines, changes while the service runs, and the limits of each key."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import threading

import openai
import pytest

from dist_aclgraph.config import ServeConfig
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.serve.http.access import Access, read_access
from dist_aclgraph.serve.http.api_keys import ApiKey, ApiKeys, read_keys
from dist_aclgraph.serve.http.edge import Edge
from dist_aclgraph.serve.http.key_limits import KeyLimits
from dist_aclgraph.serve.observe.request_account import KEY_NAME
from dist_aclgraph.serve.openai.errors import RateLimitError
from tests.serve.conftest import serving, until
from tests.serve.keys import write_keys
from tests.serve.openai.test_errors import CHAT, HI, MODEL, assert_error

FIRST, SECOND = "first-0123456789abcdef", "second-0123456789abcdef"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def opened(path):
    return read_access(ServeConfig(api_keys_file=str(path)), checks_host=True)


# -- the file --------------------------------------------------------------------------------------


def test_a_line_has_a_key_and_may_have_a_name_and_limits(tmp_path):
    path = write_keys(
        tmp_path / "keys",
        f"# ours\n\n{FIRST}\n  # more\n{SECOND} running=4  name=alice requests_per_minute=60\n",
    )

    first, second = read_keys(path)

    assert first == ApiKey.of(FIRST)
    assert first.name.startswith("key-") and not first.has_limits
    assert second == ApiKey.of(SECOND, "alice", requests_per_minute=60, max_running=4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no keys"),
        ("short", "line 1 of .* a key of 5 characters"),
        (f"{FIRST}\n{SECOND} name=a b", "line 2 of .* words that are no options"),
        (f"{FIRST} name=a/b", "wrong name"),
        (f"{FIRST} running=0", "wrong limit"),
        (f"{FIRST} requests_per_minute=1e3", "wrong limit"),
        (b"\xff\xfe", "is not text"),
        (b"x" * (1 << 20) + b"y", "exceeds 1048576 bytes"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_configuration_error(tmp_path, content, words):
    path = tmp_path / "keys"
    if content is not None:
        write_keys(path, "")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(ConfigError, match=words) as caught:
        opened(path)
    assert FIRST not in str(caught.value) and SECOND not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o602])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path, mode):
    path = write_keys(tmp_path / "my keys", FIRST)
    path.chmod(mode)

    with pytest.raises(ConfigError, match=rf"mode {mode:04o}.*run: chmod 600 '.*/my keys'"):
        opened(path)
    path.chmod(0o640)
    assert opened(path).keys.find(FIRST.encode())


def test_a_named_pipe_is_refused_without_waiting_for_its_writer(tmp_path):
    os.mkfifo(tmp_path / "keys", 0o600)

    with pytest.raises(ConfigError, match="is not a regular file"):
        opened(tmp_path / "keys")


# -- changes of the file ---------------------------------------------------------------------------


def test_a_changed_file_is_read_again_but_not_more_than_once_a_second(tmp_path):
    path, clock = write_keys(tmp_path / "keys", FIRST), Clock()
    keys = ApiKeys(path, clock=clock)
    assert keys.find(FIRST.encode())

    write_keys(path, f"{SECOND} name=new")
    assert keys.find(FIRST.encode())
    clock.now_s = 1.0

    assert keys.find(FIRST.encode()) is None
    assert keys.find(SECOND.encode()).name == "new"


def test_a_broken_change_keeps_the_previous_keys_and_is_logged_once(tmp_path, caplog):
    path, clock = write_keys(tmp_path / "keys", FIRST), Clock()
    keys = ApiKeys(path, clock=clock)
    caplog.set_level(logging.INFO)

    def look():
        clock.now_s += 1.0
        assert keys.find(FIRST.encode())
        return [record.message for record in caplog.records if record.levelname == "ERROR"]

    write_keys(path, "short")
    assert len(look()) == 1
    [error] = look()
    assert "stay as they were" in error and "a key of 5 characters" in error
    path.unlink()
    assert "cannot read" in look()[1]
    write_keys(path, f"{FIRST}\n{SECOND}")
    assert len(look()) == 2 and keys.find(SECOND.encode())
    assert FIRST not in caplog.text


def test_a_repaired_mode_is_noticed(tmp_path):
    path, clock = write_keys(tmp_path / "keys", FIRST), Clock()
    keys = ApiKeys(path, clock=clock)
    write_keys(path, SECOND).chmod(0o644)
    clock.now_s = 1.0
    assert keys.find(SECOND.encode()) is None

    path.chmod(0o600)
    clock.now_s = 2.0

    assert keys.find(SECOND.encode())


def test_a_copy_for_another_machine_reads_the_file_too(tmp_path):
    """Ray Serve sends a pickled copy of the keys to its replicas. The clock of a replica's machine
    can show another time.
    """
    path = write_keys(tmp_path / "keys", FIRST)
    copy = pickle.loads(pickle.dumps(opened(path)))
    write_keys(path, SECOND)

    assert copy.keys.find(FIRST.encode()) is None
    assert copy.keys.find(SECOND.encode())


def test_the_key_of_the_environment_stays_beside_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("DIST_ACLGRAPH_API_KEY", SECOND)
    keys = opened(write_keys(tmp_path / "keys", FIRST)).keys
    write_keys(tmp_path / "keys", "another-0123456789abcdef")

    assert keys.find(FIRST.encode()) is None
    assert keys.find(SECOND.encode()).name == "DIST_ACLGRAPH_API_KEY"


def test_a_running_service_refuses_a_revoked_key_and_takes_a_new_one(tmp_path):
    path = write_keys(tmp_path / "keys", FIRST)
    with serving(opened(path)) as service:

        def status(key, of):
            return service.http.get(of, headers=bearer(key)).status_code

        assert [status(FIRST, of) for of in ("/v1/models", "/metrics")] == [200, 200]
        write_keys(path, SECOND)

        until(lambda: status(FIRST, "/v1/models") == 401)
        for of in ("/v1/models", "/metrics", "/status.json"):
            assert status(SECOND, of) == 200
        assert status(FIRST, "/metrics") == 401


# -- limits ----------------------------------------------------------------------------------------


def begun(limits, key, count):
    for _ in range(count):
        limits.begin(key)
        limits.end(key)


def test_requests_a_minute_are_a_token_bucket():
    clock, key = Clock(), ApiKey.of(FIRST, "alice", requests_per_minute=6)
    limits = KeyLimits(clock)

    begun(limits, key, 6)
    clock.now_s = 5.0
    with pytest.raises(RateLimitError, match="'alice' may begin 6 requests a minute") as caught:
        limits.begin(key)
    assert caught.value.retry_after_s == 5
    clock.now_s += caught.value.retry_after_s
    begun(limits, key, 1)
    clock.now_s += 1000.0
    begun(limits, key, 6)
    with pytest.raises(RateLimitError):
        limits.begin(key)


def test_running_requests_are_limited_and_owed_ones_only_counted():
    limits, key = KeyLimits(Clock()), ApiKey.of(FIRST, "alice", max_running=2)

    limits.begin(key)
    limits.begin(key, is_owed=True)
    limits.begin(key, is_owed=True)
    with pytest.raises(RateLimitError, match=r"3 requests of the API key 'alice' .* have 2"):
        limits.begin(key)
    for _ in range(2):
        limits.end(key)
    limits.begin(key)


def test_keys_do_not_share_limits_and_no_limit_is_the_default():
    limits = KeyLimits(Clock())
    one, other = (ApiKey.of(key, requests_per_minute=1) for key in (FIRST, SECOND))

    begun(limits, one, 1)
    begun(limits, other, 1)
    begun(limits, ApiKey.of("third-0123456789abcdef"), 100)
    with pytest.raises(RateLimitError):
        limits.begin(one)


def test_a_client_above_its_rate_gets_a_429_that_says_when_to_try_again(tmp_path):
    path = write_keys(tmp_path / "keys", f"{FIRST} name=alice requests_per_minute=1\n{SECOND}")
    body = {"model": MODEL, "messages": HI}
    with serving(opened(path)) as service:
        service.answer("a")
        ours = {"api_key": FIRST, "max_retries": 0}
        client = openai.OpenAI(base_url=f"{service.url}/v1", **ours)
        client.chat.completions.create(**body)

        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(**body)
        messages = service.http.post(
            "/v1/messages", json={**body, "max_tokens": 1}, headers={"x-api-key": FIRST}
        )

        assert 0 < int(caught.value.response.headers["retry-after"]) <= 60
        assert caught.value.code == "rate_limit_exceeded"
        assert messages.status_code == 429
        assert messages.json()["error"]["type"] == "rate_limit_error"
        assert "'alice' may begin 1 requests" in messages.json()["error"]["message"]
        assert service.http.get("/metrics", headers=bearer(FIRST)).status_code == 200
        assert service.http.post(CHAT, json=body, headers=bearer(SECOND)).status_code == 200


def test_a_request_that_has_ended_makes_room_for_the_next_one(tmp_path):
    path = write_keys(tmp_path / "keys", f"{FIRST} running=1")
    body = {"model": MODEL, "messages": HI}
    with serving(opened(path)) as service:
        go_on = threading.Event()
        service.engine.reply = lambda submit: go_on.wait(60) and [65]
        replies = []

        def ask():
            replies.append(service.http.post(CHAT, json=body, headers=bearer(FIRST)))

        first = threading.Thread(target=ask)
        first.start()
        until(lambda: service.engine.submitted)

        refused = service.http.post(CHAT, json=body, headers=bearer(FIRST))
        go_on.set()
        first.join()
        ask()

        assert "may have 1" in assert_error(refused, 429)["message"]
        assert refused.headers["retry-after"] == "1"
        assert [reply.status_code for reply in replies] == [200, 200]


def test_the_scope_names_the_key_of_a_request(service):
    keys = ApiKeys(fixed=(ApiKey.of(FIRST, "alice"),))
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/models",
        "headers": [(b"x-api-key", FIRST.encode())],
    }
    seen = []

    async def app(scope, receive, send):
        seen.append(scope[KEY_NAME])

    asyncio.run(Edge(app, Access(keys), service.state, lambda scope: "")(scope, None, None))

    assert seen == ["alice"]
    assert FIRST not in repr(keys.__dict__)
