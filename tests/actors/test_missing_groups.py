"""Groups that hang, that cannot be replaced at once, and rolls that end early."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from dist_aclgraph.errors import RollError
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
from tests.checkpoints import copy_of
from tests.deployments import Serving, greedy_params, make_deployment_config, serving

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

LONG = 400
ALL_SERVE = {"serving": 2, "draining": 0, "lost": 0}


def engine_pids(service: Serving) -> list[int]:
    report = service.report()
    return [group["engine_pid"] for group in (report, *report["groups"])]


def test_an_engine_that_hangs_loses_no_request_and_its_group_is_replaced(
    checkpoint: Path,
) -> None:
    config = make_deployment_config(
        checkpoint, parallel={"dp": 2}, graph=GRAPH, timeouts={"link_s": 5.0}
    )
    with serving(config) as service:
        wanted = [a.tokens for a in service.generate(PROMPTS, greedy_params(TOKENS))]
        workers, engines = pids_of(service), engine_pids(service)
        with streams(service) as found:
            os.kill(engines[1], signal.SIGSTOP)

            wait_until(lambda: names_of(service) == {"0", "2"}, "no other group", 180)
            count = len(found.ended)
            wait_until(lambda: len(found.ended) > count + NUM_STREAMS, "the streams stand", 60)
            assert service.client.capacity().by_state() == ALL_SERVE
        assert service.client.num_resumed > 0
        assert service.client.num_losses()["silent"] == 1
        assert_all_equal(found, wanted)
        assert_processes_are_gone([engines[1]])
        assert pids_of(service) == workers  # it keeps its weights
    assert_all_npus_are_free()


def test_a_replacement_that_fails_is_tried_again_and_capacity_is_said_meanwhile(
    checkpoint: Path, tmp_path: Path
) -> None:
    directory = copy_of(checkpoint, tmp_path)
    weights, away = directory / "model.safetensors", tmp_path / "away"
    config = make_deployment_config(directory, parallel={"dp": 2}, graph=GRAPH)
    with serving(config) as service:
        wanted = [a.tokens for a in service.generate(PROMPTS, greedy_params(TOKENS))]
        weights.rename(away)
        os.kill(pids_of(service)[1], signal.SIGKILL)

        wait_until(lambda: bool(service.report()["missing_groups"]["reason"]), "no trouble", 180)
        assert service.report()["missing_groups"]["count"] == 1
        capacity = service.client.capacity()
        assert capacity.by_state() == {"serving": 1, "draining": 0, "lost": 1}
        assert "rank 1 in SERVING" in capacity.lost["1"]
        again = service.generate(PROMPTS, greedy_params(TOKENS), "again")
        assert [answer.tokens for answer in again] == wanted

        away.rename(weights)

        wait_until(lambda: names_of(service) == {"0", "2"}, "it is not tried again", 240)
        wait_until(lambda: service.client.capacity().by_state() == ALL_SERVE, "one is lost")
        wait_until(
            lambda: service.report()["missing_groups"] == {"count": 0, "reason": ""}, "trouble"
        )
    assert_all_npus_are_free()


def test_the_death_of_all_groups_at_once_loses_no_request(checkpoint: Path) -> None:
    """Of one the worker dies, of the other one the engine: nobody is left to tell of new groups."""
    config = make_deployment_config(checkpoint, parallel={"dp": 2}, graph=GRAPH)
    with serving(config) as service:
        wanted = [a.tokens for a in service.generate(PROMPTS, greedy_params(TOKENS))]
        workers, engines = pids_of(service), engine_pids(service)
        with streams(service) as found:
            for pid in (workers[0], *engines):
                os.kill(pid, signal.SIGKILL)

            wait_until(lambda: service.report()["state"] == "RECOVERING", "it does not know", 60)
            service.deployment.check()
            wait_until(lambda: set(service.client.states()) == {"2", "3"}, "no others", 240)
            count = len(found.ended)
            wait_until(lambda: len(found.ended) > count + NUM_STREAMS, "the streams stand", 60)
        assert service.report()["state"] == "SERVING"
        assert service.client.outage_seconds() > 0
        assert_all_equal(found, wanted)
    assert_all_npus_are_free()


def test_a_roll_that_ends_early_says_who_runs_what_and_goes_on_when_it_is_repeated(
    checkpoint: Path, tmp_path: Path
) -> None:
    directory = copy_of(checkpoint, tmp_path)
    weights, away = directory / "model.safetensors", tmp_path / "away"
    config = make_deployment_config(directory, parallel={"dp": 2}, graph=GRAPH)
    other = make_deployment_config(
        directory, parallel={"dp": 2}, graph=GRAPH, kv={"num_blocks": 160, "block_size": 64}
    )
    errors: list[Exception] = []
    with serving(config) as service:
        wanted = [a.tokens for a in service.generate(PROMPTS, greedy_params(TOKENS))]
        wait_until(lambda: names_of(service) == {"0", "1"}, "not all answer")
        held = [service.submit(f"h{i}", PROMPTS[i % 4], greedy_params(LONG)) for i in range(8)]

        def roll() -> None:
            try:
                service.deployment.roll(other)
            except RollError as e:
                errors.append(e)

        rolling = threading.Thread(target=roll, daemon=True)
        rolling.start()
        wait_until(lambda: service.client.capacity().total == 3, "no new group", 180)
        weights.rename(away)
        rolling.join(240)

        [error] = errors
        assert "group 2 runs the new configuration, group 1 runs the one from before" in str(error)
        assert names_of(service) == {"1", "2"}
        blocks = [group["num_blocks"] for group in (service.report(), *service.report()["groups"])]
        assert sorted(blocks) == [64, 160]
        again = service.generate(PROMPTS, greedy_params(TOKENS), "again")
        assert [answer.tokens for answer in again] == wanted
        assert [answer.error for answer in held] == [""] * len(held)

        away.rename(weights)
        service.deployment.roll(other)

        wait_until(lambda: names_of(service) == {"2", "3"}, "the roll did not go on")
    assert_all_npus_are_free()
