"""Groups that come, drain, die and are replaced while others serve."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from dist_aclgraph.errors import ConfigError, DistAclGraphError, PlacementError
from tests.actors.leftovers import (
    assert_all_npus_are_free,
    assert_processes_are_gone,
    wait_until,
)
from tests.actors.streams import (
    GRAPH,
    NUM_STREAMS,
    PROMPTS,
    TOKENS,
    assert_all_equal,
    names_of,
    pids_of,
    streams,
)
from tests.deployments import greedy_params, make_deployment_config, serving

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

LONG = 400


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

        with pytest.raises(PlacementError, match="8 NPUs; free are 6"):
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


def test_groups_that_leave_drain_side_by_side(checkpoint: Path) -> None:
    with serving(make_deployment_config(checkpoint, parallel={"dp": 3}, graph=GRAPH)) as service:
        wait_until(lambda: names_of(service) == {"0", "1", "2"}, "not all answer")
        answers = [
            service.submit(f"long{i}", PROMPTS[i % 4], greedy_params(LONG)) for i in range(9)
        ]
        assert all(answer.began.wait(60) for answer in answers)
        scaling = threading.Thread(target=service.deployment.scale, args=[1], daemon=True)
        scaling.start()

        wait_until(lambda: service.client.capacity().draining == 2, "one drains after the other")

        for answer in answers:
            assert answer.ended.wait(120)
            assert (answer.finish_reason, answer.error) == ("length", "")
        scaling.join(120)
        wait_until(lambda: service.client.capacity().total == 1, "groups stay")
    assert_all_npus_are_free()
