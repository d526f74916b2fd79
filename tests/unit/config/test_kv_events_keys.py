"""The configuration keys of kv.events decide who may read the events, and at which ports."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dist_aclgraph.config import Config, make_config
from dist_aclgraph.errors import ConfigError


def make(events: dict[str, Any], **sections: Any) -> Config:
    return make_config({"model": "m", "kv": {"events": events}, **sections})


def test_nothing_is_published_by_default() -> None:
    events = make_config({"model": "m"}).kv.events

    assert not events.publish
    assert (events.host, events.topic) == ("127.0.0.1", "")
    assert len(events.port_range) == len(events.replay_range or ()) == 64


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "192.0.2.7", "2001:db8::1"])
def test_addresses_beyond_loopback_need_the_users_word(host: str) -> None:
    with pytest.raises(ConfigError, match="insecure=true") as e:
        make({"publish": True, "host": host})

    assert "\n" not in str(e.value)
    allowed = make({"publish": True, "host": host, "insecure": True}).kv.events.host
    assert allowed == host.strip("[]")
    assert make({"host": host}).kv.events.publish is False


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_needs_no_word(host: str) -> None:
    assert make({"publish": True, "host": host}).kv.events.host == host


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ({"host": "*"}, "must be an address"),
        ({"host": "localhost"}, "must be an address"),
        ({"ports": "5557"}, "kv.events.ports"),
        ({"ports": "9-8", "replay_ports": None}, "must be FIRST-LAST"),
        ({"ports": "5000-5001"}, "ports has 2 ports and replay_ports has 64"),
        ({"ports": "5000-5001", "replay_ports": "5001-5002"}, "ports in common"),
        ({"ports": "5000-5001", "replay_ports": "4999-5000"}, "ports in common"),
    ],
)
def test_addresses_at_which_no_publisher_can_listen_are_refused(
    events: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make(events)


@pytest.mark.parametrize(
    ("section", "keys"), [("scheduler", {"prefix_cache": False}), ("recovery", {"exact": True})]
)
def test_events_of_no_prefix_cache_are_refused(section: str, keys: dict[str, bool]) -> None:
    with pytest.raises(ConfigError, match=rf"kv\.events\.publish.*{section}\.{next(iter(keys))}"):
        make({"publish": True}, **{section: keys})
