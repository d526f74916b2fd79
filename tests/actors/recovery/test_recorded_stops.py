"""The steps that real ranks have recorded show which rank a planted fault has stopped."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from dist_aclgraph.actors.worker.stopped_ranks import Explanation, explain_stop, step_of
from dist_aclgraph.cli.explain import read_groups, show_groups
from dist_aclgraph.errors import ConfigError
from tests.actors.leftovers import wait_until
from tests.actors.serving_ranks import ServingRanks, serving_ranks
from tests.actors.strikes import arm, wait_for_tokens
from tests.checkpoints import make_prompts
from tests.deployments import Answer, greedy_params, make_deployment_config
from tests.lockstep import lockstep
from tests.plans import make_plan

STUCK_S = 600.0
LONG = 1500
VICTIM = 1  # the rank that each planted fault stops
# The MLP's activation runs after the first collective that follows attention, and before the second
# collective.
IN_MLP = r"rank 1 all_reduce 1 (of layer \d after attention \(step \d+\)); rank 0 all_reduce 2 \1"


def sleep_at_a_step(step: Any) -> None:
    """Sleep for a long time, like a rank's host code that never returns."""
    time.sleep(STUCK_S)


def make_config(checkpoint: Path, folder: Path, **overrides: Any) -> Any:
    keys = {
        "parallel": {"tp": 2},
        "graph": {"mode": "NONE"},
        "recovery": {"resume_s": 0},
        "logging": {"directory": str(folder), "folder": "start"},
    }
    return make_deployment_config(checkpoint, **{**keys, **overrides})


def explained(folder: Path) -> Explanation:
    """Return the reason why the only group stopped or hangs, as far as the ranks' recorded steps
    show it at this moment.
    """
    (ranks,) = read_groups(folder / "start").values()
    return explain_stop(ranks)


def wait_for_blame(folder: Path, words: str) -> Explanation:
    """Wait until the recordings blame ``VICTIM`` with a sentence that contains ``words``."""

    def is_blamed() -> bool:
        found = explained(folder)
        return found.blamed == (VICTIM,) and words in found.sentence

    wait_until(is_blamed, f"nobody is blamed with {words!r}")
    return explained(folder)


@contextmanager
def busy(config: Any, directory: Path) -> Iterator[tuple[ServingRanks, list[Answer]]]:
    """Within this context, requests decode on all ranks. At its end, the ranks are killed."""
    with serving_ranks(config, directory) as service:
        params = greedy_params(LONG)
        answers = [service.submit(f"r{i}", p, params) for i, p in enumerate(make_prompts([9, 5]))]
        wait_for_tokens(answers)
        try:
            yield service, answers
        finally:
            for info in service.ranks.infos:
                with suppress(ProcessLookupError):
                    os.kill(info.pid, signal.SIGKILL)


def test_a_rank_killed_in_decode_is_blamed(checkpoint: Path, tmp_path: Path) -> None:
    with busy(make_config(checkpoint, tmp_path), tmp_path) as (service, answers):
        os.kill(service.ranks.infos[VICTIM].pid, signal.SIGKILL)
        assert answers[0].ended.wait(STUCK_S)

        wait_for_blame(tmp_path, "rank 1")
    console = Console(record=True, width=200)
    show_groups(read_groups(tmp_path / "start"), console)
    shown = console.export_text()
    assert "rank 1" in shown and "eager" in shown


@pytest.mark.slow
def test_a_rank_killed_in_prefill_is_blamed(checkpoint: Path, tmp_path: Path) -> None:
    fault = {"file": str(tmp_path / "fault")}
    keys = {"device": {"emulator": {"strict": False, "fault": fault}}}
    config = make_config(checkpoint, tmp_path, **keys)
    with serving_ranks(config, tmp_path) as service:
        arm(tmp_path / "fault", f"fault_op=aclnnSwiGlu fault_kind=die fault_rank={VICTIM}")
        answer = service.submit("r", make_prompts([200])[0], greedy_params(9))
        assert answer.ended.wait(STUCK_S) and not answer.tokens

        wait_for_blame(tmp_path, "rank 1 ended or hangs without a word")


@pytest.mark.slow
def test_a_stopped_rank_is_blamed_while_it_is_stopped(checkpoint: Path, tmp_path: Path) -> None:
    with busy(make_config(checkpoint, tmp_path), tmp_path) as (service, _):
        os.kill(service.ranks.infos[VICTIM].pid, signal.SIGSTOP)

        wait_for_blame(tmp_path, "rank 1")


@pytest.mark.slow
def test_a_rank_whose_host_is_stuck_is_blamed(checkpoint: Path, tmp_path: Path) -> None:
    with busy(make_config(checkpoint, tmp_path), tmp_path) as (service, _):
        service.ranks.workers[VICTIM].send(("__setattr__", ("check_plan", sleep_at_a_step)))

        wait_for_blame(
            tmp_path, "rank 1 is stuck on its host, before the end of a step's first stage"
        )


@pytest.mark.slow
def test_a_stalled_device_is_told_from_a_stuck_host(checkpoint: Path, tmp_path: Path) -> None:
    fault = {"file": str(tmp_path / "fault")}
    keys = {"device": {"emulator": {"strict": False, "fault": fault}}}
    config = make_config(checkpoint, tmp_path, **keys)
    with busy(config, tmp_path):
        words = f"fault_op=aclnnSwiGlu fault_kind=stall fault_rank={VICTIM} stall_s={STUCK_S:g}"
        arm(tmp_path / "fault", words)

        def all_wait() -> bool:
            return "all ranks waited for their devices" in explained(tmp_path).sentence

        wait_until(all_wait, "the ranks do not wait")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "operator", "blamed", "places"),
    [
        ("NONE", "aclnnSwiGlu", (VICTIM,), IN_MLP),
        ("PIECEWISE", "aclnnSwiGlu", (VICTIM,), IN_MLP),
        ("FULL_DECODE_ONLY", "aclnnSwiGlu", (VICTIM,), IN_MLP),
        ("FULL_DECODE_ONLY", "HcclAllGather", (), r"rank 0, 1 all_gather 1 of the head \(step"),
    ],
)
def test_a_stalled_device_is_named_with_its_layer_and_collective(
    mode: str, operator: str, blamed: tuple[int, ...], places: str, checkpoint: Path, tmp_path: Path
) -> None:
    keys = {
        "device": {"emulator": {"strict": False, "fault": {"file": str(tmp_path / "fault")}}},
        "graph": {"mode": mode, **({} if mode == "NONE" else {"sizes": [2]})},
        "logging": {"directory": str(tmp_path), "folder": "start", "record_collectives": True},
    }
    with busy(make_config(checkpoint, tmp_path, **keys), tmp_path) as (service, _):
        words = f"fault_op={operator} fault_kind=stall fault_rank={VICTIM} stall_s={STUCK_S:g}"
        arm(tmp_path / "fault", words)
        sentences: list[str] = []

        def is_explained() -> bool:
            # A rank records the progress of its device only when a message arrives. So the test
            # sends a message to each rank.
            for worker in service.ranks.workers:
                worker.send(("ping", ()))  # like the controller's heartbeat
            found = explained(tmp_path)
            sentences.append(found.sentence)
            stopped = "waited for their devices" in found.sentence and found.blamed == blamed
            return stopped and re.search(places, found.sentence) is not None

        wait_until(is_explained, lambda: f"the stop is explained otherwise: {sentences[-1]}")


@pytest.mark.slow
def test_a_rank_that_holds_another_plan_is_blamed(checkpoint: Path, tmp_path: Path) -> None:
    with busy(make_config(checkpoint, tmp_path), tmp_path) as (service, answers):
        other = msgspec.structs.replace(make_plan(), version=77)
        service.ranks.workers[VICTIM].send(("adopt", (other,)))
        assert answers[0].ended.wait(STUCK_S)

        wait_for_blame(tmp_path, "this rank holds 77")


@pytest.mark.slow
def test_a_failed_link_is_named_with_its_rank(checkpoint: Path, tmp_path: Path) -> None:
    fault = {"file": str(tmp_path / "fault")}
    keys = {"device": {"emulator": {"strict": False, "fault": fault}}}
    config = make_config(checkpoint, tmp_path, **keys)
    with busy(config, tmp_path) as (_, answers):
        arm(tmp_path / "fault", f"fault_op=HcclAllReduce fault_kind=link fault_rank={VICTIM}")
        assert answers[0].ended.wait(STUCK_S)

        wait_for_blame(tmp_path, "rank 1 failed first")


@pytest.mark.slow
def test_a_rank_that_is_stuck_in_a_capture_is_blamed(checkpoint: Path, tmp_path: Path) -> None:
    fault = {
        "op": "aclnnSwiGlu", "when": "capture", "kind": "stall", "rank": VICTIM, "stall_s": 5.0,
    }  # fmt: skip
    keys = {
        "device": {"emulator": {"strict": False, "fault": fault}},
        "graph": {"mode": "FULL_DECODE_ONLY", "sizes": [4], "budget_model": "cann-pinned"},
    }
    config = make_config(checkpoint, tmp_path, **keys)
    found: list[Explanation] = []

    def is_found() -> bool:
        with suppress(ConfigError):  # raised while no rank has begun to record
            found.append(explained(tmp_path))
        return bool(found) and "is stuck in capture" in found[-1].sentence

    looking = threading.Thread(target=wait_until, args=[is_found, "nobody is stuck"], daemon=True)
    looking.start()
    with lockstep(config):  # the stalled capture ends, but only after the time limit
        looking.join()

    assert found[-1].blamed == (VICTIM,)
    assert "before the first step, rank 1 is stuck in capture full decode 4" in found[-1].sentence


def test_recordings_of_ranks_that_were_told_to_stop_blame_nobody(
    checkpoint: Path, tmp_path: Path
) -> None:
    with serving_ranks(make_config(checkpoint, tmp_path), tmp_path) as service:
        answer = service.submit("r", make_prompts([9])[0], greedy_params(5))
        assert answer.ended.wait(STUCK_S)

    wait_until(lambda: explained(tmp_path).blamed == (), "a rank is blamed")
    (ranks,) = read_groups(tmp_path / "start").values()
    assert {step_of(rank) for rank in ranks} == {step_of(ranks[0])}
