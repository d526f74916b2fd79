"""Subscribers get numbered messages, and can request missed messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import zmq

from dist_aclgraph.actors.wire.event_publisher import EventPublishers, PublisherPlace
from dist_aclgraph.errors import PlacementError
from tests.actors.kv_sockets import LOOPBACK, Reader, free_ports

STEPS = 4


@pytest.fixture
def place() -> PublisherPlace:
    ports, replays = free_ports(2), free_ports(2)
    return PublisherPlace(LOOPBACK, ports, replays, b"kv@pod@model", buffer_steps=STEPS)


@pytest.fixture
def publishers(place: PublisherPlace) -> Iterator[EventPublishers]:
    publishers = EventPublishers(place, 1)
    yield publishers
    publishers.close()


@pytest.fixture
def reader(place: PublisherPlace) -> Iterator[Reader]:
    assert place.replay_ports is not None
    reader = Reader(place.ports[0], place.replay_ports[0])
    yield reader
    reader.close()


def test_messages_are_numbered_and_have_the_topic(
    publishers: EventPublishers, reader: Reader
) -> None:
    reader.subscribe(publishers[0].publish)

    publishers[0].publish(b"a")
    publishers[0].publish(b"b")

    topic, number, _ = reader.receive_until(b"a")
    assert topic == b"kv@pod@model"
    assert reader.receive() == (topic, number + 1, b"b")
    assert [each for each, _ in reader.replay(0)][-2:] == [number, number + 1]


def test_the_last_messages_are_replayed(publishers: EventPublishers, reader: Reader) -> None:
    for number in range(STEPS + 2):
        publishers[0].publish(b"%d" % number)

    assert reader.replay(4) == [(4, b"4"), (5, b"5")]
    assert reader.replay(0) == [(n, b"%d" % n) for n in range(2, STEPS + 2)]
    assert reader.replay(6) == []
    assert reader.topics == {b"kv@pod@model"}


def test_large_messages_are_forgotten_earlier(place: PublisherPlace, reader: Reader) -> None:
    publishers = EventPublishers(replace(place, buffer_bytes=100), 1)
    for _ in range(3):
        publishers[0].publish(b"x" * 50)

    assert [number for number, _ in reader.replay(0)] == [1, 2]
    publishers.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b"", b"short"],
        [b"x", bytes(8)],
        [bytes(8)],
        [b"", bytes(8), b""],
        [b"", bytes(1 << 16)],
    ],
)
def test_requests_of_another_form_change_nothing(
    place: PublisherPlace, publishers: EventPublishers, reader: Reader, frames: list[bytes]
) -> None:
    publishers[0].publish(b"a")
    assert place.replay_ports is not None
    stranger = Reader(place.ports[0], place.replay_ports[0])
    stranger.request(*frames)
    stranger.request(b"", bytes(8))

    assert reader.replay(0) == [(0, b"a")]
    stranger.close()


def test_each_publisher_takes_a_port_and_its_replay_port(place: PublisherPlace) -> None:
    first = EventPublishers(place, 1)
    second = EventPublishers(place, 1)
    assert (first[0].index, second[0].index) == (0, 1)
    with pytest.raises(PlacementError, match=r"kv\.events\.ports"):
        EventPublishers(place, 1)
    first.close()

    again = EventPublishers(place, 1)

    assert again[0].index == 0
    second.close()
    again.close()


def test_a_port_whose_replay_port_is_taken_is_left_out(place: PublisherPlace) -> None:
    assert place.replay_ports is not None
    with zmq.Context() as context, context.socket(zmq.PULL) as other:
        other.bind(f"tcp://{LOOPBACK}:{place.replay_ports[0]}")
        publishers = EventPublishers(place, 1)
        assert publishers[0].index == 1
        publishers.close()


def test_a_foreign_address_names_the_key(place: PublisherPlace) -> None:
    with pytest.raises(PlacementError, match=r"203\.0\.113\.1 .*kv\.events\.host"):
        EventPublishers(PublisherPlace("203.0.113.1", place.ports), 1)


def test_messages_are_not_kept_without_replay_ports(place: PublisherPlace) -> None:
    publishers = EventPublishers(PublisherPlace(LOOPBACK, place.ports), 1)
    reader = Reader(place.ports[0])
    reader.subscribe(publishers[0].publish)
    assert publishers[0].replays is None
    publishers.close()
    reader.close()


def test_a_reader_that_stops_reading_loses_messages_and_finds_them_again(
    place: PublisherPlace, reader: Reader
) -> None:
    publishers = EventPublishers(replace(place, buffer_steps=1000, max_unsent=1), 1)
    publish = publishers[0].publish
    known = reader.subscribe(publish)
    for _ in range(16):
        publish(bytes(1 << 20))

    gap = reader.first_gap(known, publish)

    assert [number for number, _ in reader.replay(gap)][:2] == [gap, gap + 1]
    publishers.close()
