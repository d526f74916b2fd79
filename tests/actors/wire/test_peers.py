"""Services with a common secret fetch files of KV blocks from each other. Services without the
secret cannot.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dist_aclgraph.actors.deployment import deployment
from dist_aclgraph.actors.wire import block_fetches
from dist_aclgraph.actors.wire.addresses import Address
from dist_aclgraph.actors.wire.block_server import BlockSource
from dist_aclgraph.actors.wire.peers import (
    MAX_TICKET_CHARS,
    TICKET_S,
    Offer,
    PeersKey,
    TicketError,
)
from dist_aclgraph.cli.doctor.examine import peers_findings
from dist_aclgraph.config import make_config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.kv.group_files import Holders
from dist_aclgraph.kv.tiers import cache_identity
from tests.actors.fetched_files import MODEL, NAMES, PLACE, WAIT_S, World
from tests.actors.kv_sockets import LOOPBACK, free_ports

SECRET, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4
NOW_S = 1.8e9


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A service that lets other services fetch its files, and a node of another service that
    fetches.
    """
    monkeypatch.setattr(block_fetches, "SILENCE_S", WAIT_S)  # slow sources are not silent
    key = PeersKey(SECRET)
    made = World(
        tmp_path,
        peer_token=key.token,
        peer_key=key.client_public,
        host=LOOPBACK,
        ports=free_ports(1),
    )
    yield made
    made.close()


def source_of(world: World) -> BlockSource:
    return BlockSource((world.address,), cache_identity(world.config), PLACE, world.holders)


def offer_of(world: World, secret: str = SECRET) -> Offer:
    offer = PeersKey(secret).offer(source_of(world), NOW_S)
    assert offer is not None
    return offer


def test_a_service_with_the_secret_fetches_by_a_ticket(world: World) -> None:
    world.write(*NAMES)

    world.fetch(source=PeersKey(SECRET).open(offer_of(world), NOW_S))

    assert world.found() == NAMES
    assert (world.fetches.counts.blocks, world.fetches.counts.failures) == (len(NAMES), 0)


def test_a_ticket_names_the_server_and_contains_no_secret(world: World) -> None:
    offer = offer_of(world)

    tcp = world.address.tcp
    assert tcp is not None and tcp.keys is not None
    assert tcp.url == f"tcp://{offer.host}:{offer.port}"
    told = base64.urlsafe_b64decode(offer.ticket)
    assert tcp.keys.server_public in told
    opened = PeersKey(SECRET).open(offer, NOW_S).addresses[0].tcp
    assert opened is not None and opened.keys is not None
    secrets = [SECRET, PeersKey(SECRET).token, tcp.keys.client_secret, opened.keys.client_secret]
    assert not any((s if isinstance(s, bytes) else s.encode()) in told for s in secrets)


@pytest.mark.parametrize("stolen", ["connection", "token"])
def test_a_fetcher_needs_both_the_key_and_the_token(
    world: World, monkeypatch: pytest.MonkeyPatch, stolen: str
) -> None:
    """A client of the API sees the ticket, so it knows the server's address and public key."""
    monkeypatch.setattr(block_fetches, "SILENCE_S", 1.0)
    world.write(*NAMES)
    right, wrong = (
        PeersKey(secret).open(offer_of(world, secret), NOW_S) for secret in (SECRET, OTHER)
    )
    source = wrong if stolen == "token" else right
    token = right.token if stolen == "token" else wrong.token

    world.fetch(source=msgspec.structs.replace(source, token=token))

    assert world.found() == []
    assert world.fetches.counts.failures == 1


def test_nobody_fetches_from_a_service_without_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_fetches, "SILENCE_S", 1.0)
    world = World(tmp_path, host=LOOPBACK, ports=free_ports(1))
    try:
        world.write(*NAMES)
        world.fetch(source=PeersKey(SECRET).open(offer_of(world), NOW_S))
        assert world.found() == []
    finally:
        world.close()


def test_files_of_another_model_are_not_fetched(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    source = PeersKey(SECRET).open(offer_of(world), NOW_S)
    other = msgspec.structs.replace(source, identity="other weights")

    assert world.fetches.ways_from(other, lambda: True) == (None, None)
    assert world.fetches.ways_from(other, lambda: True) == (None, None)

    assert caplog.text.count("its files of the model") == 1


def changed(ticket: str, index: int) -> str:
    found = bytearray(base64.urlsafe_b64decode(ticket))
    found[index] ^= 1
    return base64.urlsafe_b64encode(found).decode()


def test_a_ticket_with_any_changed_byte_is_refused(world: World) -> None:
    offer, key = offer_of(world), PeersKey(SECRET)
    for index in range(len(base64.urlsafe_b64decode(offer.ticket))):
        with pytest.raises(TicketError, match="not signed with the key"):
            key.open(offer._replace(ticket=changed(offer.ticket, index)), NOW_S)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ticket": ""}, "not signed"),
        ({"ticket": "AAAA"}, "not signed"),
        ({"ticket": "*"}, "not in Base64"),
        ({"ticket": "\u00e9"}, "not in Base64"),
        ({"ticket": "A" * (MAX_TICKET_CHARS + 1)}, "more than"),
        ({"host": "10.9.8.7"}, "remote_host and remote_port"),
        ({"port": 1}, "remote_host and remote_port"),
    ],
)
def test_parameters_that_do_not_belong_together_are_refused(
    world: World, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(TicketError, match=words):
        PeersKey(SECRET).open(offer_of(world)._replace(**changes), NOW_S)


def test_a_ticket_of_another_secret_is_refused(world: World) -> None:
    with pytest.raises(TicketError, match="not signed"):
        PeersKey(SECRET).open(offer_of(world, OTHER), NOW_S)


def test_a_ticket_expires(world: World) -> None:
    key, offer = PeersKey(SECRET), offer_of(world)
    key.open(offer, NOW_S + TICKET_S - 1)
    with pytest.raises(TicketError, match="it expired 0 s ago"):
        key.open(offer, NOW_S + TICKET_S)


def test_a_signed_message_of_another_version_is_refused(world: World) -> None:
    key = PeersKey(SECRET)
    body = msgspec.msgpack.encode([1, 2])
    ticket = base64.urlsafe_b64encode(key._mac(body) + body).decode()
    with pytest.raises(TicketError, match="another version"):
        key.open(offer_of(world)._replace(ticket=ticket), NOW_S)


@pytest.mark.parametrize(
    "holders",
    [
        Holders(((0,),)),
        Holders(((0,), (0,), (0,))),
        Holders(((0,), (0,)), ((0,),)),
        Holders(((0,), (1,))),
        Holders(((0,), (-1,))),
        Holders(((0,), ())),
    ],
)
def test_a_ticket_whose_files_have_no_nodes_is_refused(world: World, holders: Holders) -> None:
    """If the ticket were accepted, the engine could not find the file's node, and an error would
    end the engine.
    """
    key = PeersKey(SECRET)
    offer = key.offer(msgspec.structs.replace(source_of(world), holders=(holders,)), NOW_S)
    assert offer is not None
    with pytest.raises(TicketError, match="another version"):
        key.open(offer, NOW_S)


def test_a_group_without_tcp_makes_no_offer(world: World) -> None:
    here = Address("source", world.address.file)
    source = msgspec.structs.replace(source_of(world), addresses=(world.address, here))
    assert PeersKey(SECRET).offer(source, NOW_S) is None


def test_a_group_with_too_many_nodes_makes_no_offer(world: World) -> None:
    many = tuple(replace(world.address, node_id=str(index)) for index in range(2000))
    source = msgspec.structs.replace(source_of(world), addresses=many)
    assert PeersKey(SECRET).offer(source, NOW_S) is None


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (SECRET, 0o604, "has mode 0604, so other users can read or change the keys"),
        (SECRET, 0o620, "has mode 0620"),
        ("short", 0o600, "has a key of 5 characters; the key needs at least 32"),
        ("", 0o600, "has a key of 0 characters"),
        ("a" * 5000, 0o600, "exceeds 4096 bytes"),
        (None, 0, "cannot read kv.peers_key_file"),
    ],
)
def test_a_file_that_protects_nothing_is_refused(
    tmp_path: Path, text: str | None, mode: int, words: str
) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    kv = {"peers_key_file": str(path), "host_gib": 1}
    config = make_config({"model": str(MODEL), "kv": kv})
    with pytest.raises(ConfigError, match=words) as e:
        deployment.start(config)
    assert SECRET not in str(e.value)
    (finding,) = peers_findings(config)
    assert (finding.is_ok, finding.found) == (False, str(e.value))


def test_both_services_derive_the_same_keys_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    kv = {"peers_key_file": str(path), "host_gib": 1}
    config = make_config({"model": "m", "kv": kv})
    key, other = PeersKey.read(config), PeersKey(SECRET)
    assert key is not None
    assert (key.token, key.client_public) == (other.token, other.client_public)
    assert [each.is_ok for each in peers_findings(config)] == [True]
    without = make_config({"model": "m"})
    assert PeersKey.read(without) is None and not peers_findings(without)
