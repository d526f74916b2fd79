"""The process that owns a deployment: it starts, watches and stops the deployment.

With ``dist-aclgraph serve`` the owner is Ray's driver. An ingress serves HTTP, and asks the owner
about the deployment (``owner_link.py``). The owner tells the ingress to drain, and then stops the
deployment.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from signal import SIGTERM
from typing import Any

from rich.console import Console

from dist_aclgraph.actors.client.outage import Outlook
from dist_aclgraph.actors.deployment.deployment_protocol import Deployment
from dist_aclgraph.actors.deployment.owner_link import Admission, OwnerLink
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
    EngineUnavailableError,
    RayDiedError,
)
from dist_aclgraph.files.log_folder import folder_path
from dist_aclgraph.logs import event
from dist_aclgraph.planning.restarts import RestartBudget

logger = logging.getLogger(__name__)

POLL_S, CHECK_S, JOIN_S = 0.1, 1.0, 2.0
SILENT_S = 30.0  # time limit for one check of the deployment
FAILED_S = 2.0  # after the deployment has failed, requests get their errors within this time
LEAVE_S = 5.0  # an ingress that has drained must end within this time

Start = Callable[..., Deployment]


class _Stopping(Exception):
    """A signal arrived while the deployment was starting."""


def own_deployment(
    opened: Opened,
    start: Start,
    signals: Signals,
    heartbeat: SharedHeartbeat,
    restarts: RestartBudget | None = None,
) -> None:
    """Start a deployment; after a signal, drain and stop the deployment.

    Args:
        heartbeat: the heartbeat that this process sends while the deployment starts and serves.
        restarts: a copy of the supervisor's budget for restarts of owners, made when this owner
            started; None if there is no supervisor. With a supervisor, a signal during the start
            ends this process at once. The supervisor then ends the processes that this process has
            started.

    Raises:
        RayDiedError: the Ray that was started for the deployment has died. The caller may start a
            new deployment. Until the new deployment serves, requests wait in the ingresses.
        DistAclGraphError: the deployment did not start, or it died.
        SystemExit: a signal arrived before anything was served; the code is 128 plus the signal's
            number.
    """
    config, console = opened.config, Console(stderr=True)
    answers = _IngressAnswers(restarts)
    with OwnerLink(opened.link, answers) as link:
        try:
            num_npus, begin_s = config.parallel.world_size, time.monotonic()
            console.print(f"Starting {config.name} on {num_npus} NPUs ...")
            if config.logging.destination == "files":
                path = folder_path(config.logging)
                console.print(f"Logs of each node: {path}", highlight=False, soft_wrap=True)
            event(logger, "deployment_starting", model=config.name, npus=num_npus)
            starting = _started(
                config, start, signals, console, answers, heartbeat, restarts is not None
            )
            with starting as running:
                event(logger, "deployment_serving", seconds=time.monotonic() - begin_s)
                try:
                    _watch(config, running, signals, answers, heartbeat)
                    _say(console, "Draining ...")
                    event(logger, "service_draining", limit_s=config.serve.drain_s)
                    answers.end("the server is stopping", config.serve.drain_s)
                except RayDiedError:
                    raise
                except BaseException as e:
                    event(logger, "service_failed", logging.ERROR, cause=str(e))
                    answers.end(str(e) or "the server is stopping", FAILED_S)
                    raise
                finally:
                    link.wait_until_left(answers.leave_s)
        finally:
            event(logger, "deployment_stopped")
            _say(console, "Stopped.")


def _say(console: Console, text: str) -> None:
    """Print a line about the end of the service. Do nothing if the terminal is already closed."""
    with suppress(OSError):
        console.print(text)


@contextmanager
def _started(
    config: Config,
    start: Start,
    signals: Signals,
    console: Console,
    answers: _IngressAnswers,
    heartbeat: SharedHeartbeat,
    has_supervisor: bool,
) -> Iterator[Deployment]:
    """Start a deployment, and stop it at the end of this context.

    A signal during the start ends the process.
    """
    try:
        with heartbeat.starting(), StartProgress(console) as show:

            def stop() -> None:
                show.stop_at_once()
                if has_supervisor:
                    os._exit(128 + signals.received)
                raise KeyboardInterrupt  # only this error interrupts a running call to Ray

            signals.on_first = stop
            if signals.received:
                stop()

            def report(progress: Any) -> None:
                # Install the handlers a second time, because Ray has replaced them.
                signals.take_over()
                if signals.received:
                    raise _Stopping
                answers.progress = f"the deployment is being started: {progress}"
                show(progress)

            # After an earlier deployment of this service, Ray may still be starting again. In this
            # case, this process waits for Ray.
            waits_for_ray = heartbeat.served_before
            running = start(config, on_progress=report, waits_for_ray=waits_for_ray)
    except (_Stopping, KeyboardInterrupt, SystemExit):  # Ray's handler of SIGTERM raises SystemExit
        raise SystemExit(128 + (signals.received or SIGTERM)) from None
    finally:
        signals.on_first = None
    has_ray = True
    try:
        signals.take_over()
        answers.running = running
        yield running
    except RayDiedError:
        has_ray = False
        raise
    finally:
        answers.progress = "the deployment is being ended"
        answers.running = None
        # If Ray has died, no actor can be stopped in an orderly way, and each attempt to stop an
        # actor takes seconds. Instead, the supervisor of this process ends the actors' processes.
        if has_ray:
            running.shut_down()


def _watch(
    config: Config,
    running: Deployment,
    signals: Signals,
    answers: _IngressAnswers,
    heartbeat: SharedHeartbeat,
) -> None:
    """Wait until a signal arrives.

    Raises:
        EngineUnavailableError: the deployment has ended; the message has the reason.
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
    """Print how clients reach the service. Return false if the controller does not answer; then
    nothing is printed.
    """
    try:
        report = running.report()
    except DistAclGraphError:
        return False  # if the deployment has ended, the regular checks will notice it
    keep_report(config.name, report)
    announce(config, report, Console())
    return True


class _IngressAnswers:
    """The answers to the ingress. The main thread sets the answers; threads of the link read them.

    Args:
        restarts: the supervisor's budget for restarts of owners; None if there is no supervisor.

    Attributes:
        running: the deployment; None before the deployment serves, and while it is being stopped.
        progress: progress of the deployment's start.
        is_open: whether an ingress has begun to admit requests.
    """

    def __init__(self, restarts: RestartBudget | None) -> None:
        self.running: Deployment | None = None
        self.progress = "the deployment is being started"
        self.is_open = False
        self._restarts = restarts
        self._admission = Admission()

    def end(self, reason: str, drain_s: float) -> None:
        """Admit no more requests. Running requests have ``drain_s`` seconds to end."""
        self._admission = Admission(reason, drain_s)

    @property
    def leave_s(self) -> float:
        """Seconds within which an ingress must end; 0 if the ingress should keep running."""
        return self._admission.drain_s + LEAVE_S if self._admission.end else 0.0

    def admission(self, is_open: bool) -> Admission:
        self.is_open = self.is_open or is_open
        left: dict[str, int] = {}
        if (running := self.running) is not None:
            left["controller"] = running.restarts_left()
        if self._restarts is not None:
            left["owner"] = self._restarts.num_left(time.monotonic())
        return Admission(self._admission.end, self._admission.drain_s, left)

    def reach(self) -> Reach | None:
        running = self.running
        try:
            reach = None if running is None else running.reach()
        except DistAclGraphError:  # the deployment might recover
            return None
        return reach if reach is not None and reach.addresses else None

    def outlook(self) -> Outlook:
        running = self.running
        if running is None:
            return Outlook(failure=self._admission.end, progress=self.progress)
        try:
            return replace(running.outlook(), node_id=running.node_id)
        except RayDiedError as e:
            return Outlook(progress=str(e))
        except DistAclGraphError as e:
            # If the main thread has begun to stop the deployment, the error is ignored.
            return Outlook(failure=str(e)) if self.running is running else self.outlook()


class _Checks:
    """Checks a deployment's health on a separate thread, because a check can hang if Ray hangs."""

    def __init__(self, running: Deployment) -> None:
        self._running = running
        self._failure: EngineUnavailableError | None = None
        self._silence = Silence(SILENT_S)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checks", daemon=True)

    def __enter__(self) -> _Checks:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Wait until the last check has ended. Stop the deployment only after this call."""
        self._ended.set()
        self._thread.join(JOIN_S)

    def raise_failure(self) -> None:
        """Raise the error that ends the service, if there is one; call this every ``POLL_S``."""
        if isinstance(self._failure, RayDiedError):
            raise self._failure
        if self._failure is not None:
            raise EngineUnavailableError(f"the service has ended: {self._failure}")
        if self._silence.listen():
            raise RayDiedError(f"Ray has not answered for {SILENT_S:.0f} s")

    def _run(self) -> None:
        while self._failure is None and not self._ended.wait(CHECK_S):
            try:
                self._running.raise_if_dead()
            except EngineUnavailableError as e:
                self._failure = e
            self._silence.heard()
