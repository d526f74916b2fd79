"""The process that owns a deployment: it starts it, watches it, and stops it.

Under ``dist-aclgraph serve`` it is Ray's driver. It serves no HTTP itself: an ingress does, which
asks it how the deployment stands (``owner_link.py``), and is told to drain before anything is
stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from signal import SIGTERM
from typing import Any

from rich.console import Console

from dist_aclgraph.actors.client.outage import Outlook
from dist_aclgraph.actors.deployment.deployment_protocol import Deployment
from dist_aclgraph.actors.deployment.owner_link import OwnerLink, Standing
from dist_aclgraph.actors.host.liveness import SharedHeartbeat, Silence
from dist_aclgraph.actors.wire.addresses import Reach
from dist_aclgraph.cli.announce import announce
from dist_aclgraph.cli.last_start import keep_report
from dist_aclgraph.cli.opened import Opened
from dist_aclgraph.cli.progress import StartProgress
from dist_aclgraph.cli.signals import Signals
from dist_aclgraph.config import Config
from dist_aclgraph.errors import (
    DistAclGraphError,
    EngineDeadError,
    EngineUnavailableError,
    RayDiedError,
)

POLL_S, CHECK_S, JOIN_S = 0.1, 1.0, 2.0
SILENT_S = 30.0  # a check of the deployment that takes longer has no answer
FAILED_S = 2.0  # for requests of a deployment that has failed, to learn of it
LEAVE_S = 5.0  # more than it drains, until an ingress has left

Start = Callable[..., Deployment]


class _Stopping(Exception):
    """A signal came while the deployment was being started."""


def own_deployment(
    opened: Opened,
    start: Start,
    signals: Signals,
    heartbeat: SharedHeartbeat,
) -> None:
    """Start a deployment, and keep it until a signal; then drain and stop all that was started.

    Args:
        heartbeat: beats while it starts and serves.

    Raises:
        RayDiedError: the Ray that was started for it has died; another deployment may take its
            place, and requests wait for it at their ingress.
        DistAclGraphError: the deployment did not come up, or died.
        SystemExit: a signal came before anything was served; 128 and its number.
    """
    config, console = opened.config, Console(stderr=True)
    answers = _Answers()
    with OwnerLink(opened.link, answers) as link:
        try:
            console.print(f"Starting {config.name} on {config.parallel.world_size} NPUs ...")
            with _started(config, start, signals, console, answers, heartbeat) as running:
                try:
                    _watch(config, running, signals, answers, heartbeat)
                    console.print("Draining ...")
                    answers.end("the server is stopping", config.serve.drain_s)
                except RayDiedError:
                    raise
                except BaseException as e:
                    answers.end(str(e) or "the server is stopping", FAILED_S)
                    raise
                finally:
                    link.wait_until_left(answers.leave_s)
        finally:
            console.print("Stopped.")


@contextmanager
def _started(
    config: Config,
    start: Start,
    signals: Signals,
    console: Console,
    answers: _Answers,
    heartbeat: SharedHeartbeat,
) -> Iterator[Deployment]:
    """Start a deployment and stop it afterwards; a signal before it serves ends the process."""
    try:
        with heartbeat.starting(), StartProgress(console) as show:

            def report(progress: Any) -> None:
                signals.take_over()  # Ray has installed handlers of its own meanwhile
                if signals.received:
                    raise _Stopping
                answers.progress = f"the deployment is being started: {progress}"
                show(progress)

            running = start(config, on_progress=report)
    except (_Stopping, SystemExit):  # Ray's own handler of SIGTERM exits, with another number
        raise SystemExit(128 + (signals.received or SIGTERM)) from None
    has_ray = True
    try:
        signals.take_over()
        answers.running = running
        yield running
    except RayDiedError:
        has_ray = False
        raise
    finally:
        answers.progress = "what is left of the deployment is being ended"
        answers.running = None
        # Without Ray nothing can be stopped in order, and to leave it so takes seconds: the
        # supervisor of this process ends what is left.
        if has_ray:
            running.shut_down()


def _watch(
    config: Config,
    running: Deployment,
    signals: Signals,
    answers: _Answers,
    heartbeat: SharedHeartbeat,
) -> None:
    """Return once a signal has come.

    Raises:
        EngineUnavailableError: the deployment serves no more; says why.
    """
    is_announced = False
    with _Checks(running) as checks:
        try:
            is_over = False
            while not is_over:
                heartbeat.beat()
                is_over = signals.wait(POLL_S)
                if answers.is_open and not is_announced:
                    is_announced = _announced(config, running)
                if not is_over:
                    checks.raise_failure()
        finally:
            heartbeat.rest()


def _announced(config: Config, running: Deployment) -> bool:
    """Say where the service is; return whether its controller could be asked for it."""
    try:
        report = running.report()
    except DistAclGraphError:
        return False  # whether all is over, the checks say
    keep_report(config.name, report)
    announce(config, report, Console())
    return True


class _Answers:
    """What the ingress is told. Owned by the main thread, read by those of the link.

    Attributes:
        running: the deployment; None before it serves, and once it is being stopped.
        progress: how far its start is.
        is_open: whether an ingress lets requests in.
    """

    def __init__(self) -> None:
        self.running: Deployment | None = None
        self.progress = "the deployment is being started"
        self.is_open = False
        self._standing = Standing()

    def end(self, reason: str, drain_s: float) -> None:
        """Have no more requests let in, and those that are in end within so long."""
        self._standing = Standing(reason, drain_s)

    @property
    def leave_s(self) -> float:
        """How long an ingress may take to leave; nothing where it is not to."""
        return self._standing.drain_s + LEAVE_S if self._standing.end else 0.0

    def standing(self, is_open: bool) -> Standing:
        self.is_open = self.is_open or is_open
        return self._standing

    def reach(self) -> Reach | None:
        running = self.running
        try:
            reach = None if running is None else running.reach()
        except DistAclGraphError:  # it may recover
            return None
        return reach if reach is not None and reach.addresses else None

    def outlook(self) -> Outlook:
        running = self.running
        if running is None:
            return Outlook(failure=self._standing.end, progress=self.progress)
        try:
            return replace(running.outlook(), node_id=running.node_id)
        except RayDiedError as e:
            return Outlook(progress=str(e))
        except DistAclGraphError as e:
            # What is being stopped gives answers that mean nothing.
            return Outlook(failure=str(e)) if self.running is running else self.outlook()


class _Checks:
    """Asks a deployment for its health in a thread: the question itself may hang with Ray."""

    def __init__(self, running: Deployment) -> None:
        self._running = running
        self._failure: EngineUnavailableError | None = None
        self._silence = Silence(SILENT_S)
        self._called_s = time.monotonic()  # when ``raise_failure`` was called last
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checks", daemon=True)

    def __enter__(self) -> _Checks:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Let the last question end, so that it meets no deployment that is being stopped."""
        self._ended.set()
        self._thread.join(JOIN_S)

    def raise_failure(self) -> None:
        """Raise what ends the service; to be called every ``POLL_S``."""
        if isinstance(self._failure, RayDiedError):
            raise self._failure
        if self._failure is not None:
            raise EngineUnavailableError(f"the service has ended: {self._failure}")
        elapsed_s = time.monotonic() - self._called_s
        self._called_s += elapsed_s
        if self._silence.listen(elapsed_s):
            raise EngineDeadError(
                f"the service has ended: Ray has not answered for {SILENT_S:.0f} s"
            )

    def _run(self) -> None:
        while self._failure is None and not self._ended.wait(CHECK_S):
            try:
                self._running.check()
            except EngineUnavailableError as e:
                self._failure = e
            self._silence.heard()
