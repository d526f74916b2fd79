"""Groups that come, drain, die and are replaced while others serve."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dist_aclgraph.errors import ConfigError, DistAclGraphError, PlacementError
from tests.actors.leftovers import (
    assert_all_npus_are_free,
    assert_processes_are_gone,
    wait_until,
)
from tests.checkpoints import make_prompts
from tests.deployments import Answer, Serving, greedy_params, make_deployment_config, serving

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

NUM_STREAMS = 32
TOKENS = 40
PROMPTS = make_prompts([20, 7, 33, 12])
GRAPH = {"sizes": [4, 12]}


@dataclass
class Streams:
    """Requests of a few prompts, of which so many run at any time, each after the last.

    Attributes:
        ended: by prompt.
    """

    service: Serving
    ended: list[tuple[int, Answer]] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self, first: int) -> None:
        for number in itertools.count():
            if self._stopping.is_set():
                return
            which = (first + number) % len(PROMPTS)
            name = f"stream{first}-{number}"
            answer = self.service.submit(name, PROMPTS[which], greedy_params(TOKENS))
            assert answer.ended.wait(120), "no answer"
            self.ended.append((which, answer))

    def stop(self) -> None:
        self._stopping.set()


@contextmanager
def streams(service: Serving, count: int = NUM_STREAMS) -> Iterator[Streams]:
    """Streams that run until the block ends; each is waited for."""
    found = Streams(service)
    threads = [threading.Thread(target=found.run, args=[i], daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(found.ended) >= count // 2, "the streams do not run")
        yield found
    finally:
        found.stop()
        for thread in threads:
            thread.join(120)


def assert_all_equal(found: Streams, wanted: list[list[int]]) -> None:
    assert [answer.error for _, answer in found.ended if answer.error] == []
    for which, answer in found.ended:
        assert answer.tokens == wanted[which]


def pids_of(service: Serving) -> list[int]:
    report = service.report()
    return [rank["pid"] for group in (report, *report["groups"]) for rank in group["ranks"]]


def names_of(service: Serving) -> set[str]:
    return set(service.client.query("metrics"))


def test_groups_are_added_and_drained_under_streams(checkpoint: Path) -> None:
    with serving(make_deployment_config(checkpoint, graph=GRAPH)) as service:
        wanted = [a.tokens for a in service.generate(PROMPTS, greedy_params(TOKENS))]
        [first] = pids_of(service)
        with streams(service) as found:
            service.deployment.scale(3)

            wait_until(lambda: service.client.capacity().serving == 3, "no new groups")
            count = len(found.ended)
            wait_until(lambda: len(found.ended) > count + 2 * NUM_STREAMS, "the streams stand")
            assert all(counts.routed_requests for counts in service.client.routed().values())
            pids = pids_of(service)
            assert len(pids) == 3 and pids[0] == first

            service.deployment.scale(1)

            assert service.client.capacity().by_state() == {"serving": 1, "draining": 0, "lost": 0}
            assert_processes_are_gone(pids[1:])
        assert_all_equal(found, wanted)
        assert names_of(service) == {"0"}
        with pytest.raises(ConfigError, match="at least 1"):
            service.deployment.scale(0)
    assert_all_npus_are_free()


def test_another_configuration_replaces_the_old_one_without_a_failed_request(
    checkpoint: Path,
) -> None:
    config = make_deployment_config(checkpoint, parallel={"dp": 2}, graph=GRAPH)
    other = make_deployment_config(
        checkpoint, parallel={"dp": 2}, graph={"sizes": [2, 6, 12]}, kv={"num_blocks": 80}
    )
    with serving(config) as service:
        wanted = [a.tokens for a in service.generate(PROMPTS, greedy_params(TOKENS))]
        old = pids_of(service)
        with streams(service) as found:
            service.deployment.roll(other)

            count = len(found.ended)
            wait_until(lambda: len(found.ended) > count + NUM_STREAMS, "the streams stand")
        assert_all_equal(found, wanted)
        assert_processes_are_gone(old)
        assert names_of(service) == {"2", "3"}
        report = service.report()
        for group in (report, *report["groups"]):
            assert group["num_blocks"] == 80
            assert list(group["plan"]["families"].values()) == [[2, 6, 12]]
    assert_all_npus_are_free()


def test_a_group_that_dies_loses_no_request_and_is_replaced(checkpoint: Path) -> None:
    config = make_deployment_config(checkpoint, parallel={"dp": 2}, graph=GRAPH)
    with serving(config) as service:
        wanted = [a.tokens for a in service.generate(PROMPTS, greedy_params(TOKENS))]
        with streams(service) as found:
            os.kill(pids_of(service)[1], signal.SIGKILL)

            wait_until(lambda: names_of(service) == {"0", "2"}, "no other group", 180)
            count = len(found.ended)
            wait_until(lambda: len(found.ended) > count + NUM_STREAMS, "the streams stand")
            assert service.client.capacity().by_state() == {"serving": 2, "draining": 0, "lost": 0}
        assert service.client.num_resumed > 0
        assert_all_equal(found, wanted)
    assert_all_npus_are_free()


def test_a_group_that_dies_takes_no_stream_of_another_with_it(checkpoint: Path) -> None:
    config = make_deployment_config(
        checkpoint, parallel={"dp": 2}, graph=GRAPH, recovery={"restarts_per_hour": 0}
    )
    with serving(config) as service:
        wanted = [a.tokens for a in service.generate(PROMPTS, greedy_params(TOKENS))]
        with streams(service, 8) as found:
            os.kill(pids_of(service)[1], signal.SIGKILL)

            wait_until(lambda: service.client.capacity().serving == 1, "nobody knows")
            assert "rank 1 in SERVING" in service.client.capacity().lost["1"]
            count, sent = len(found.ended), service.client.routed()["1"].routed_requests
            wait_until(lambda: len(found.ended) > count + 16, "the streams stand")
            assert service.client.routed()["1"].routed_requests == sent
            service.client.check()
            service.deployment.check()

            # Its place is taken by a new one, under a name of its own.
            service.deployment.scale(2)

            wait_until(lambda: names_of(service) == {"0", "2"}, "the dead group is still there")
            assert service.client.capacity().by_state() == {"serving": 2, "draining": 0, "lost": 0}
        assert_all_equal(found, wanted)
    assert_all_npus_are_free()


def test_groups_that_do_not_come_up_change_nothing(checkpoint: Path) -> None:
    config = make_deployment_config(checkpoint, parallel={"tp": 2}, graph=GRAPH)
    with serving(config) as service:
        wanted = [a.tokens for a in service.generate(PROMPTS, greedy_params(TOKENS))]

        with pytest.raises(PlacementError, match="8 NPUs, and 6 are free"):
            service.deployment.scale(5)
        with pytest.raises(DistAclGraphError, match="promised"):
            service.deployment.roll(
                make_deployment_config(
                    checkpoint, parallel={"tp": 2}, graph=GRAPH, max_model_len=64
                )
            )
        with pytest.raises(ConfigError, match="name changes"):
            service.deployment.roll(
                make_deployment_config(
                    checkpoint, parallel={"tp": 2}, graph=GRAPH, served_model_name="another"
                )
            )

        assert service.client.capacity().total == 1
        again = service.generate(PROMPTS, greedy_params(TOKENS), "again")
        assert [answer.tokens for answer in again] == wanted
    assert_all_npus_are_free()


def test_the_number_of_groups_follows_the_requests_that_wait(checkpoint: Path) -> None:
    autoscale = {"max_groups": 2, "target_waiting": 2, "up_s": 1.0, "down_s": 2.0}
    config = make_deployment_config(checkpoint, graph=GRAPH, serve={"autoscale": autoscale})
    with serving(config) as service:
        wanted = [a.tokens for a in service.generate(PROMPTS, greedy_params(TOKENS))]

        with streams(service) as found:
            wait_until(lambda: service.client.capacity().serving == 2, "no other group", 120)

        wait_until(lambda: service.client.capacity().total == 1, "both groups stay", 120)
        assert_all_equal(found, wanted)
    assert_all_npus_are_free()
