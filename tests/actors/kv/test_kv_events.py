"""A router that reads an engine's events learns which prefixes are in the engine's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.engine.kv_events import publisher_place
from dist_aclgraph.actors.wire.event_publisher import PublisherPlace
from dist_aclgraph.config import KVEventsConfig
from tests.actors.kv_sockets import LOOPBACK, Reader, free_ports
from tests.actors.loop_group import BLOCK, NODE, TOKEN, WAIT_S, Group
from tests.deployments import (
    Answer,
    deployed,
    greedy_params,
    make_deployment_config,
    serving,
)
from tests.kv_subscriber import Subscriber

MODEL = Path(__file__).parents[3] / "models" / "tiny-qwen3"
PROMPTS = [[7] * 40, [7] * BLOCK + [8] * 30, [9] * 70]
SECRET = [5] * 60


@pytest.fixture
def place() -> PublisherPlace:
    ports, replays = free_ports(2), free_ports(2)
    return PublisherPlace(LOOPBACK, ports, replays)


@pytest.fixture
def start(tmp_path: Path, place: PublisherPlace) -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def start(**options: int) -> Group:
        directory = tmp_path / str(len(groups))
        directory.mkdir()
        groups.append(Group(directory, events_at=place, **options))
        return groups[-1]

    yield start
    for group in groups:
        group.close()


def run(group: Group, prompts: list[list[int]], salt: str = "") -> None:
    client = EngineClient([group.clients_at], TOKEN, node_id=NODE, link_s=WAIT_S)
    for index, prompt in enumerate(prompts):
        answer = Answer()
        client.submit(f"{salt}{index}", prompt, greedy_params(20), [], answer.take, cache_salt=salt)
        assert answer.ended.wait(WAIT_S)
    client.close()


def read(place: PublisherPlace, index: int) -> Subscriber:
    assert place.replay_ports is not None
    reader, subscriber = Reader(place.ports[index], place.replay_ports[index]), Subscriber()
    for number, (found, payload) in enumerate(reader.replay(0)):
        assert found == number
        subscriber.apply(payload)
    reader.close()
    return subscriber


def test_a_subscriber_of_each_rank_knows_its_prefixes_without_those_of_salts(
    start: Callable[..., Group], place: PublisherPlace
) -> None:
    group = start(dp=2)
    run(group, PROMPTS)
    run(group, [SECRET], salt="private")

    subscribers = [read(place, rank) for rank in range(2)]

    longest = [max(each.longest_prefix(p, BLOCK) for each in subscribers) for p in PROMPTS]
    assert longest == [len(prompt) // BLOCK for prompt in PROMPTS]
    assert [subscriber.rank for subscriber in subscribers if subscriber.blocks] == [
        rank for rank in range(2) if subscribers[rank].blocks
    ]
    pools = [rank.pool for rank in group.scheduler.ranks]
    num_secret = (len(SECRET) + 20 - 1) // BLOCK
    assert sum(len(each.blocks) for each in subscribers) == (
        sum(pool.num_cached for pool in pools) - num_secret
    )
    assert not any(each.longest_prefix(SECRET, BLOCK) for each in subscribers)


def test_evictions_are_published_too(start: Callable[..., Group], place: PublisherPlace) -> None:
    group = start(num_blocks=10)
    for first in range(6):
        run(group, [[first] * 60])

    subscriber = read(place, 0)

    assert "BlockRemoved" in subscriber.seen
    assert len(subscriber.blocks) == group.scheduler.ranks[0].pool.num_cached


def test_a_group_that_ends_and_the_next_one_clear_what_subscribers_know(
    start: Callable[..., Group], place: PublisherPlace
) -> None:
    first = start()
    assert place.replay_ports is not None
    reader = Reader(place.ports[0])
    prompts = ([first] * 40 for first in count())
    reader.subscribe(lambda _: run(first, [next(prompts)]))

    first.loop.fail("out of luck")

    last = Subscriber()
    while last.seen != ["AllBlocksCleared"]:
        last = Subscriber()
        last.apply(reader.receive()[2])
    reader.close()
    first.close()  # now, the next group can use the same ports
    start()
    again = read(place, 0)
    assert (again.seen, again.blocks) == (["AllBlocksCleared"], {})


def test_the_keys_of_the_configuration_are_the_publishers_place() -> None:
    keys = KVEventsConfig(
        host="::1", ports="10-11", replay_ports="20-21", topic="kv@a@b", buffer_steps=5
    )

    assert publisher_place(keys) == PublisherPlace(
        "::1", range(10, 12), range(20, 22), b"kv@a@b", 5
    )
    assert publisher_place(KVEventsConfig(replay_ports=None)).replay_ports is None


@pytest.mark.slow
@deployed
def test_the_groups_of_a_deployment_publish_at_the_ports_of_the_configuration(
    place: PublisherPlace,
) -> None:
    ports, replays = (f"{each[0]}-{each[-1]}" for each in (place.ports, place.replay_ports or ()))
    events = {"publish": True, "ports": ports, "replay_ports": replays}
    config = make_deployment_config(
        MODEL, parallel={"dp": 2}, kv={"block_size": BLOCK, "events": events}
    )
    with serving(config) as service:
        service.generate(PROMPTS, greedy_params(4))
        subscribers = [read(place, index) for index in range(2)]

    assert [each.rank for each in subscribers] == [0, 1]
    longest = [max(each.longest_prefix(p, BLOCK) for each in subscribers) for p in PROMPTS]
    assert longest == [len(prompt) // BLOCK for prompt in PROMPTS]
