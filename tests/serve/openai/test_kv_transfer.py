"""A router lets one service compute a prompt, and another service generate the answer, as with
vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from dist_aclgraph.actors.wire.addresses import Address, Endpoint, PeerKeys
from dist_aclgraph.actors.wire.block_server import BlockSource
from dist_aclgraph.actors.wire.messages import GroupEntry, GroupList
from dist_aclgraph.actors.wire.peers import TICKET_S, PeersKey
from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.kv.group_files import Holders
from dist_aclgraph.kv.tiers import CachePlace
from dist_aclgraph.logs import FIELDS, SELDOM_S, SeldomEvent
from dist_aclgraph.scheduler.routing import block_hashes
from tests.serve.conftest import Service, serving, until
from tests.serve.openai.test_errors import assert_error

# The parameters that vLLM's proxies send to the service that computes the prompt.
DECODE_ELSEWHERE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
SECRET = "0123456789abcdef" * 4
KEYS = PeerKeys(b"p" * 40, b"c" * 40, b"s" * 40)
SOURCE = BlockSource(
    (Address("node", Endpoint("ipc://x"), Endpoint("tcp://10.0.0.5:20001", KEYS)),),
    "identity",
    CachePlace(num_heads=2, num_kv_heads=2, num_ranks=1),
    (Holders(((0,), (0,))),),
)
PROMPT = list(range(5, 305))
MODEL = "tiny-qwen3"


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Yield a service that is configured to keep copies of KV. Its fake engine writes no files."""
    folder = str(tmp_path_factory.mktemp("files"))
    with serving(kv={"host_gib": 0.01, "host_path": folder}) as service:
        yield service


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Yield a service that shares a secret with other services, and sends files to them."""
    folder = tmp_path_factory.mktemp("shared")
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text(SECRET)
    kv = {"host_gib": 0.01, "host_path": str(folder), "peers_key_file": str(key)}
    with serving(kv=kv, serve={"strict": True}) as service:
        entry = GroupEntry("0", service.engine.address, 100, 16, blocks=SOURCE)
        service.engine.groups = GroupList(1, (entry,))
        until(lambda: service.state.client.blocks_of("0") is not None)
        yield service


def complete(service: Service, params: Any, **more: Any) -> Any:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, **more}
    return service.http.post("/v1/completions", json={**body, "kv_transfer_params": params})


def test_the_answer_names_the_files_of_the_prompt(keeping: Service) -> None:
    reply = complete(keeping, DECODE_ELSEWHERE, cache_salt="s").json()

    (group,) = keeping.state.client._table.router._groups.values()
    size = group.tokens_per_block
    names = [each.hex() for each in block_hashes(pack_ints(PROMPT), "s", size)]
    assert names and reply["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": MODEL,
        "remote_block_ids": names,
        "remote_host": None,
        "remote_port": None,
    }
    assert keeping.engine.submitted[-1].hands_over, "the engine ends it when the files are complete"


def test_the_other_service_continues(keeping: Service) -> None:
    params = complete(keeping, DECODE_ELSEWHERE).json()["kv_transfer_params"]

    reply = complete(keeping, params, max_tokens=3).json()

    assert reply["choices"][0]["finish_reason"] == "length"
    assert "kv_transfer_params" not in reply
    assert not keeping.engine.submitted[-1].hands_over


def test_an_answer_that_is_complete_has_no_parameters(keeping: Service) -> None:
    keeping.answer("")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}

    reply = keeping.http.post(
        "/v1/chat/completions", json={**body, "kv_transfer_params": DECODE_ELSEWHERE}
    ).json()

    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["kv_transfer_params"] is None


@pytest.mark.parametrize(
    ("params", "more", "words"),
    [
        ({"do_remote_decode": True, "do_remote_prefill": True}, {}, "are both true"),
        (DECODE_ELSEWHERE, {"stream": True}, "n 1 and stream false"),
        (DECODE_ELSEWHERE, {"n": 2}, "n 1 and stream false"),
        (DECODE_ELSEWHERE, {"prompt": ["a", "b"]}, "one prompt"),
        ({"do_remote_decode": "yes"}, {}, "kv_transfer_params.do_remote_decode: expected bool"),
        ("x", {}, "kv_transfer_params"),
    ],
)
def test_parameters_that_cannot_be_are_refused(
    keeping: Service, params: Any, more: dict[str, Any], words: str
) -> None:
    reply = complete(keeping, params, **more)

    assert words in assert_error(reply)["message"]


def test_a_service_without_copies_only_continues(service: Service) -> None:
    reply = complete(service, DECODE_ELSEWHERE)

    assert "kv.host_gib or kv.disk" in assert_error(reply)["message"]
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "tp_size": 8}
    assert complete(service, params).status_code == 200


def test_services_with_a_secret_send_a_ticket(sharing: Service) -> None:
    params = complete(sharing, DECODE_ELSEWHERE).json()["kv_transfer_params"]
    reply = complete(sharing, params, max_tokens=3)

    assert (params["remote_host"], params["remote_port"]) == ("10.0.0.5", 20001)
    assert reply.status_code == 200, "strict services know the field"
    peer = sharing.engine.submitted[-1].peer
    assert peer is not None and peer.token == PeersKey(SECRET).token
    assert peer.addresses[0].tcp is not None and peer.addresses[0].tcp.url == "tcp://10.0.0.5:20001"
    assert (peer.identity, peer.place, peer.holders) == (
        SOURCE.identity,
        SOURCE.place,
        SOURCE.holders,
    )


def test_chats_take_tickets_too(sharing: Service) -> None:
    params = complete(sharing, DECODE_ELSEWHERE).json()["kv_transfer_params"]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}

    sharing.http.post("/v1/chat/completions", json={**body, "kv_transfer_params": params})

    assert sharing.engine.submitted[-1].peer is not None


def forged(now_s: float = 0.0, secret: str = SECRET) -> dict[str, Any]:
    offer = PeersKey(secret).offer(SOURCE, now_s or time.time())
    assert offer is not None
    return {f"remote_{name}": value for name, value in offer._asdict().items()}


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"remote_ticket": "AAAA"}, "not signed"),
        ({"remote_ticket": 5}, "expected str"),
        ({"remote_ticket": "A" * 70_000}, "more than 65536 characters"),
        ({"remote_host": "10.6.6.6"}, "remote_host and remote_port"),
        ({"remote_port": "x"}, "expected int"),
        (forged(secret="f" * 64), "not signed"),
        (forged(now_s=time.time() - TICKET_S - 60), "it expired"),
    ],
)
def test_a_ticket_that_cannot_be_used_is_ignored_with_one_event(
    sharing: Service,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    cause: str,
) -> None:
    refused = SeldomEvent(logging.getLogger("dist_aclgraph"), "kv_ticket_refused", logging.WARNING)
    monkeypatch.setattr(sharing.state, "refused_tickets", refused)
    params = complete(sharing, DECODE_ELSEWHERE).json()["kv_transfer_params"]

    reply = complete(sharing, {**params, **changes}, max_tokens=3)

    assert reply.status_code == 200
    assert sharing.engine.submitted[-1].peer is None
    (record,) = [r for r in caplog.records if "kv_ticket_refused" in str(vars(r))]
    assert cause in str(vars(record))


def test_many_refused_tickets_do_not_fill_the_log(
    sharing: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1e6
    log = logging.getLogger("dist_aclgraph")
    refused = SeldomEvent(log, "kv_ticket_refused", logging.WARNING, lambda: now_s)
    monkeypatch.setattr(sharing.state, "refused_tickets", refused)
    params = {"do_remote_prefill": True, **forged(), "remote_ticket": "AAAA"}

    for _ in range(3):
        complete(sharing, params)
    now_s += SELDOM_S
    complete(sharing, params)

    fields = [vars(r)[FIELDS] for r in caplog.records if "kv_ticket_refused" in str(vars(r))]
    assert [each["count"] for each in fields] == [1, 3]


def test_services_without_a_secret_ignore_tickets(keeping: Service) -> None:
    params = {"do_remote_prefill": True, **forged()}
    assert complete(keeping, params, max_tokens=3).status_code == 200
    assert keeping.engine.submitted[-1].peer is None


def test_a_group_that_sends_no_files_gets_no_ticket(sharing: Service) -> None:
    lonely = GroupEntry("0", sharing.engine.address, 100, 16)
    before, after = sharing.engine.groups, GroupList(2, (lonely,))
    assert before is not None
    try:
        sharing.engine.groups = after
        until(lambda: sharing.state.client.blocks_of("0") is None)
        params = complete(sharing, DECODE_ELSEWHERE).json()["kv_transfer_params"]
        assert params["remote_host"] is None and "remote_ticket" not in params
    finally:
        sharing.engine.groups = msgspec.structs.replace(before, version=3)
        until(lambda: sharing.state.client.blocks_of("0") is not None)
