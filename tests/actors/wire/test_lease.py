"""A process keeps its lease as long as heartbeat questions arrive. The clock moves only when a test
moves it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dist_aclgraph.actors.engine.engine import Engine
from dist_aclgraph.actors.host.liveness import Lease
from dist_aclgraph.actors.host.run_directory import directories
from dist_aclgraph.actors.wire.addresses import Place
from dist_aclgraph.actors.wire.step_channel import StepSender
from dist_aclgraph.actors.worker.rank_stages import RunningRank
from dist_aclgraph.actors.worker.worker import Worker
from dist_aclgraph.config import make_config
from dist_aclgraph.topology import GroupRank, WorldRank
from tests.slow import slow

LIMIT_S = 10.0
CONFIG = make_config({"model": "unused", "timeouts": {"link_s": 1.0}})


@dataclass
class Holder:
    """A process with a lease. Its clock is a variable.

    The process checks its lease at regular intervals, but not while the process is stopped.
    """

    now_s: float = 0.0
    asked: int = 0
    lease: Lease = field(init=False)

    def __post_init__(self) -> None:
        self.lease = Lease(LIMIT_S, lambda: self.now_s)

    def ask(self) -> None:
        self.asked += 1
        self.lease.renew(self.asked)

    def run(self, seconds: float) -> bool:
        """Let the process run for ``seconds``; return whether its lease ended."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += self.lease.look_s
            if self.lease.look():
                return True
        return False

    def stand_still(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_lease_is_held_before_the_first_question() -> None:
    holder = Holder()

    assert not holder.run(10 * LIMIT_S)
    assert holder.lease.is_held()


def test_questions_keep_a_lease() -> None:
    holder = Holder()
    for _ in range(10):
        holder.ask()
        assert not holder.run(0.9 * LIMIT_S)
        assert holder.lease.is_held()


def test_without_questions_a_lease_is_held_no_more_and_then_over() -> None:
    holder = Holder()
    holder.ask()

    assert not holder.run(1.1 * LIMIT_S)
    assert not holder.lease.is_held()
    assert holder.run(1.1 * LIMIT_S)


def test_a_question_that_comes_late_renews_a_lease() -> None:
    holder = Holder()
    holder.ask()
    holder.run(1.5 * LIMIT_S)

    holder.ask()

    assert holder.lease.is_held()
    assert not holder.run(0.9 * LIMIT_S)


def test_a_lease_that_was_given_back_is_never_over() -> None:
    holder = Holder()
    holder.ask()
    holder.lease.give_back()

    assert not holder.run(10 * LIMIT_S)


def test_after_a_stop_only_the_second_question_renews_the_lease() -> None:
    holder = Holder()
    holder.ask()
    holder.stand_still(1.5 * LIMIT_S)

    assert not holder.lease.is_held()
    holder.ask()  # this question may have been sent before the stop, so it renews nothing
    assert not holder.lease.is_held()
    holder.ask()
    assert holder.lease.is_held()


def test_a_question_that_comes_first_after_a_stop_does_not_renew_the_lease() -> None:
    holder = Holder()
    holder.ask()
    holder.stand_still(1.5 * LIMIT_S)

    holder.ask()

    assert not holder.lease.is_held()


def test_a_stopped_holder_that_gets_no_question_ends() -> None:
    holder = Holder()
    holder.ask()
    holder.stand_still(100 * LIMIT_S)

    assert not holder.run(1.0 * LIMIT_S)
    assert holder.run(1.2 * LIMIT_S)


def _keep(leaseholder: Engine | Worker, asks: Any, goes_on: Any) -> None:
    """Send heartbeat questions to an actor, one per 0.1 s, while the event ``asks`` is set. Set the
    event ``goes_on`` after about 5 s.
    """
    for number in itertools.count(1):
        if asks.is_set():
            leaseholder.ping(number)
        if number == 50:
            goes_on.set()
        time.sleep(0.1)


def _keep_engine(asks: Any, goes_on: Any) -> None:
    _keep(Engine(CONFIG), asks, goes_on)


def _keep_worker(asks: Any, goes_on: Any) -> None:
    """Run a worker whose loop waits for steps, and send it heartbeat questions; see ``_keep``."""
    worker = Worker(CONFIG, 1)
    worker._stage = Mock(spec=RunningRank, joined=Mock())
    with tempfile.TemporaryDirectory() as directory:
        engine = StepSender((WorldRank(0),), Place("node", directory, None))
        address = engine.address_for("node", GroupRank(0))
        threading.Thread(target=worker.run_loop, args=(address,), daemon=True).start()
        _keep(worker, asks, goes_on)


@pytest.mark.parametrize("keep", [_keep_engine, slow(_keep_worker)])
def test_an_actor_that_nobody_asks_ends_itself(keep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = multiprocessing.get_context("spawn")
    asks, goes_on = spawn.Event(), spawn.Event()
    asks.set()
    actor = spawn.Process(target=keep, args=(asks, goes_on), daemon=True)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short, as sockets need
        monkeypatch.setenv("TMPDIR", folder)
        actor.start()
        assert goes_on.wait(120)
        assert actor.exitcode is None

        asks.clear()

        actor.join(180)
        assert actor.exitcode == 1
        assert not directories(Path(folder))
