"""Groups are added, drained, replaced and killed, and some hang, while other groups serve.

Most tests share a deployment of two groups. Each of these tests leaves two serving groups for the
next test.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError, DistAclGraphError, PlacementError, RollError
from tests.actors.leftovers import (
    assert_all_npus_are_free,
    assert_processes_are_gone,
    free_npus,
    wait_until,
)
from tests.actors.streams import (
    GRAPH,
    NUM_STREAMS,
    PROMPTS,
    TOKENS,
    Streams,
    assert_all_equal,
    names_of,
    pids_of,
    streams,
)
from tests.checkpoints import copy_of
from tests.deployments import Serving, greedy_params, make_deployment_config, serving

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

LONG = 400
START_S = 240.0  # time limit for the start of a group while other groups serve
ALL_SERVE = {"serving": 2, "draining": 0, "lost": 0}


@dataclass
class Pair:
    """The two serving groups of the shared deployment.

    Attributes:
        configs: two configurations. Both groups have the same configuration; a roll changes to the
            other configuration.
        weights, away: path of the file of weights; path to which tests move this file, so that new
            groups do not find it.
        wanted: the correct output tokens of each prompt in ``PROMPTS``.
    """

    service: Serving
    configs: tuple[Config, Config]
    weights: Path
    away: Path
    wanted: list[list[int]]

    @property
    def next_config(self) -> Config:
        """The configuration in ``configs`` that the groups do not run now."""
        running = self.service.report()["num_blocks"]
        [other] = [config for config in self.configs if config.kv.num_blocks != running]
        return other

    def engine_pids(self) -> list[int]:
        report = self.service.report()
        return [group["engine_pid"] for group in (report, *report["groups"])]

    def all_serve(self) -> bool:
        by_state = self.service.client.capacity().by_state()
        return by_state == ALL_SERVE and len(names_of(self.service)) == 2

    def assert_answers(self, prefix: str) -> None:
        again = self.service.generate(PROMPTS, greedy_params(TOKENS), prefix)
        assert [answer.tokens for answer in again] == self.wanted


@pytest.fixture(scope="module")
def shared(
    ray_cluster: None, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    directory = copy_of(checkpoint, tmp_path_factory.mktemp("pair"))
    weights, away = directory / "model.safetensors", directory.with_suffix(".away")

    def make_config(sizes: list[int], num_blocks: int) -> Config:
        return make_deployment_config(
            directory,
            parallel={"dp": 2},
            graph={"sizes": sizes},
            kv={"num_blocks": num_blocks},
            timeouts={"link_s": 5.0},
            recovery={"restarts_per_hour": 1000},
        )

    configs = make_config(GRAPH["sizes"], 64), make_config([2, 6, 12], 80)
    with serving(configs[0]) as service:
        wanted = [a.tokens for a in service.generate(PROMPTS, greedy_params(TOKENS))]
        yield Pair(service, configs, weights, away, wanted)
    assert_all_npus_are_free()


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    """Wait until both groups serve, and return them."""
    wait_until(shared.all_serve, "the test before has left a group that does not serve", START_S)
    yield shared
    if shared.away.exists():
        shared.away.rename(shared.weights)


def assert_streams_go_on(found: Streams, count: int = NUM_STREAMS) -> None:
    before = len(found.ended)
    wait_until(lambda: len(found.ended) > before + count, "the streams stand")


@pytest.mark.slow
def test_an_engine_that_hangs_loses_no_request_and_its_group_is_replaced(pair: Pair) -> None:
    client, names = pair.service.client, names_of(pair.service)
    workers, engine = pids_of(pair.service), pair.engine_pids()[1]
    num_resumed, num_silent = client.num_resumed, client.num_losses()["silent"]
    with streams(pair.service) as found:
        os.kill(engine, signal.SIGSTOP)

        wait_until(lambda: bool(names_of(pair.service) - names), "no other group", START_S)
        wait_until(pair.all_serve, "one is lost", START_S)
        assert_streams_go_on(found)
    assert client.num_resumed > num_resumed
    assert client.num_losses()["silent"] == num_silent + 1
    assert_all_equal(found, pair.wanted)
    assert_processes_are_gone([engine])
    assert pids_of(pair.service) == workers  # the workers keep their weights


def test_groups_are_added_and_drain_side_by_side_under_streams(pair: Pair) -> None:
    service, before = pair.service, pids_of(pair.service)
    losses = service.client.num_losses()
    with streams(service, len(PROMPTS)) as found:
        service.deployment.scale(3)

        wait_until(lambda: service.client.capacity().serving == 3, "no new group")
        wait_until(lambda: len(names_of(service)) == 3, "not all answer")
        assert_streams_go_on(found)
        routed = service.client.routed()
        assert all(routed[name].routed_requests for name in names_of(service))
        pids = pids_of(service)
        assert len(pids) == 3 and pids[:2] == before

        answers = [
            service.submit(f"long{i}", PROMPTS[i % 4], greedy_params(LONG)) for i in range(9)
        ]
        assert all(answer.began.wait(180) for answer in answers)
        scaling = threading.Thread(target=service.deployment.scale, args=[1], daemon=True)
        scaling.start()

        wait_until(lambda: service.client.capacity().draining == 2, "one drains after the other")
        scaling.join(120)

        assert service.client.capacity().by_state() == {"serving": 1, "draining": 0, "lost": 0}
        assert_processes_are_gone(pids[1:])
        assert service.client.num_losses() == losses  # the drained groups do not count as lost
        for answer in answers:
            assert answer.ended.wait(120)
            assert (answer.finish_reason, answer.error) == ("length", "")
        assert len(names_of(service)) == 1
        service.deployment.scale(2)
        wait_until(pair.all_serve, "no second group")
    assert_all_equal(found, pair.wanted)


@pytest.mark.slow
def test_groups_that_do_not_come_up_change_nothing(pair: Pair) -> None:
    service, names = pair.service, names_of(pair.service)
    changes = pair.next_config.model_dump()

    with pytest.raises(ConfigError, match="at least 1"):
        service.deployment.scale(0)
    with pytest.raises(PlacementError, match="7 NPUs; free are 6"):
        service.deployment.scale(9)
    with pytest.raises(DistAclGraphError, match="promised"):
        service.deployment.roll(Config.model_validate({**changes, "max_model_len": 64}))
    with pytest.raises(ConfigError, match="name changes"):
        service.deployment.roll(Config.model_validate({**changes, "served_model_name": "another"}))

    assert names_of(service) == names and pair.all_serve()
    pair.assert_answers("unchanged")


@pytest.mark.slow  # slow; another, fast test also rolls groups while requests run
def test_another_configuration_replaces_the_old_one_without_a_failed_request(pair: Pair) -> None:
    service, other = pair.service, pair.next_config
    old, names = pids_of(service), names_of(service)
    with streams(service) as found:
        service.deployment.roll(other)

        assert_streams_go_on(found)
    assert_all_equal(found, pair.wanted)
    assert_processes_are_gone(old)
    wait_until(pair.all_serve, "not all answer")
    assert not names_of(service) & names
    report = service.report()
    for group in (report, *report["groups"]):
        assert group["num_blocks"] == other.kv.num_blocks
        assert list(group["plan"]["families"].values()) == [list(other.graph.sizes or ())]


def test_a_dead_group_loses_no_request_and_its_replacement_is_tried_again_when_it_fails(
    pair: Pair,
) -> None:
    service, names = pair.service, names_of(pair.service)
    num_resumed = service.client.num_resumed
    pair.weights.rename(pair.away)
    with streams(service) as found:
        # A group can be idle for a moment, if all of its streams are between two requests. These
        # long requests keep both groups busy all the time.
        held = [service.submit(f"d{i}", PROMPTS[i % 4], greedy_params(LONG)) for i in range(8)]
        assert all(answer.began.wait(180) for answer in held)
        os.kill(pids_of(service)[1], signal.SIGKILL)

        wait_until(lambda: bool(service.report()["missing_groups"]["reason"]), "no word", START_S)
        assert service.report()["missing_groups"]["count"] == 1
        capacity = service.client.capacity()
        assert capacity.by_state() == {"serving": 1, "draining": 0, "lost": 1}
        [loss] = capacity.lost.values()
        assert re.search(r"rank \d+ in SERVING", loss)
        assert_streams_go_on(found)

        pair.away.rename(pair.weights)

        wait_until(lambda: bool(names_of(service) - names), "it is not tried again", START_S)
        wait_until(pair.all_serve, "one is lost")
        assert_streams_go_on(found)
    assert service.client.num_resumed > num_resumed
    assert_all_equal(found, pair.wanted)
    for answer in held:
        assert answer.ended.wait(120)
        assert (answer.finish_reason, answer.error) == ("length", "")
    assert len(names_of(service) & names) == 1
    wait_until(lambda: service.report()["missing_groups"] == {"count": 0, "reason": ""}, "trouble")


@pytest.mark.slow
def test_the_death_of_all_groups_at_once_loses_no_request(pair: Pair) -> None:
    """A worker and all engines die, so no engine is left to tell clients the addresses of new
    groups.
    """
    service, names = pair.service, names_of(pair.service)
    outage_s = service.client.outage_seconds()
    workers, engines = pids_of(service), pair.engine_pids()
    with streams(service) as found:
        for pid in (workers[0], *engines):
            os.kill(pid, signal.SIGKILL)

        wait_until(lambda: service.report()["state"] == "RECOVERING", "it does not know")
        service.deployment.raise_if_dead()
        wait_until(
            lambda: len(set(service.client.states()) - names) == 2 and pair.all_serve(),
            "no others",
            START_S,
        )
        assert_streams_go_on(found)
    assert service.report()["state"] == "SERVING"
    assert service.client.outage_seconds() > outage_s
    assert_all_equal(found, pair.wanted)


@pytest.mark.slow
def test_a_roll_that_ends_early_says_who_runs_what_and_goes_on_when_it_is_repeated(
    pair: Pair,
) -> None:
    service, other, names = pair.service, pair.next_config, names_of(pair.service)
    errors: list[Exception] = []
    held = [service.submit(f"h{i}", PROMPTS[i % 4], greedy_params(LONG)) for i in range(8)]

    def roll() -> None:
        try:
            service.deployment.roll(other)
        except RollError as e:
            errors.append(e)

    rolling = threading.Thread(target=roll, daemon=True)
    rolling.start()
    wait_until(lambda: service.client.capacity().total == 3, "no new group", START_S)
    pair.weights.rename(pair.away)
    rolling.join(START_S)

    [error] = errors
    found = re.search(
        r"group (\d+) runs the new configuration, group (\d+) runs the one from before", str(error)
    )
    assert found is not None, error
    assert names_of(service) == {found[1], found[2]}
    assert found[1] not in names and found[2] in names
    blocks = [group["num_blocks"] for group in (service.report(), *service.report()["groups"])]
    assert sorted(blocks) == [64, 80]
    pair.assert_answers("mixed")
    assert [answer.error for answer in held] == [""] * len(held)

    pair.away.rename(pair.weights)
    service.deployment.roll(other)

    wait_until(pair.all_serve, "the roll did not go on")
    assert found[1] in names_of(service) and not names_of(service) & names


@pytest.mark.slow
def test_a_group_that_dies_takes_no_stream_of_another_with_it(checkpoint: Path) -> None:
    config = make_deployment_config(
        checkpoint, parallel={"dp": 2}, graph=GRAPH, recovery={"restarts_per_hour": 0}
    )
    free = free_npus()  # some NPUs may still belong to the shared deployment
    with serving(config) as service:
        wanted = [a.tokens for a in service.generate(PROMPTS, greedy_params(TOKENS))]
        with streams(service, 8) as found:
            os.kill(pids_of(service)[1], signal.SIGKILL)

            wait_until(lambda: service.client.capacity().serving == 1, "nobody knows")
            assert "rank 1 in SERVING" in service.client.capacity().lost["1"]
            count, sent = len(found.ended), service.client.routed()["1"].routed_requests
            wait_until(lambda: len(found.ended) > count + 16, "the streams stand")
            assert service.client.routed()["1"].routed_requests == sent
            service.client.raise_if_dead()
            service.deployment.raise_if_dead()

            # The lost group is replaced by a group with a new name.
            service.deployment.scale(2)

            wait_until(lambda: names_of(service) == {"0", "2"}, "the dead group is still there")
            assert service.client.capacity().by_state() == {"serving": 2, "draining": 0, "lost": 0}
        assert_all_equal(found, wanted)
    assert_all_npus_are_free(free)


@pytest.mark.slow
def test_the_number_of_groups_follows_the_requests_that_wait(checkpoint: Path) -> None:
    autoscale = {"max_groups": 2, "target_waiting": 2, "up_s": 1.0, "down_s": 2.0}
    config = make_deployment_config(checkpoint, graph=GRAPH, serve={"autoscale": autoscale})
    free = free_npus()
    with serving(config) as service:
        wanted = [a.tokens for a in service.generate(PROMPTS, greedy_params(TOKENS))]

        with streams(service, 32) as found:  # more requests than one group can run at a time
            wait_until(lambda: service.client.capacity().serving == 2, "no other group", 120)

        wait_until(lambda: service.client.capacity().total == 1, "both groups stay", 120)
        assert_all_equal(found, wanted)
    assert_all_npus_are_free(free)
