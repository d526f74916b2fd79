"""``dist-aclgraph serve`` runs ingresses, which serve HTTP, and the owner of their deployment.

The owner and each ingress (``serve.replicas``) are processes under a supervisor. With
``recovery.keep_answers: false``, one process is both owner and ingress.

The service begins to listen before it starts the deployment, and listens until the deployment has
stopped. The service does not use Ray Serve. If the service joins a cluster, it does not change the
applications and proxies of the cluster's Ray Serve.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial

from dist_aclgraph.actors.cluster.choose_starter import choose_starter
from dist_aclgraph.actors.deployment import deployment
from dist_aclgraph.actors.host.liveness import Beat, SharedHeartbeat
from dist_aclgraph.actors.host.process_starter import ProcessStarter
from dist_aclgraph.cli.ingress import serve_http
from dist_aclgraph.cli.native_output import native_output_in
from dist_aclgraph.cli.opened import Opened, open_service
from dist_aclgraph.cli.owner import Start, own_deployment
from dist_aclgraph.cli.signals import Signals
from dist_aclgraph.cli.supervise import Supervisor
from dist_aclgraph.config import Config
from dist_aclgraph.environment import prepare_ray_environment, ray_address
from dist_aclgraph.logs import ProcessLog
from dist_aclgraph.planning.restarts import RestartBudget
from dist_aclgraph.serve.http.open_files import allow_connections
from dist_aclgraph.serve.resume.holder import HolderLink

log = logging.getLogger(__name__)
# An owner that sends no heartbeat for this time is killed. The owner sends no heartbeat while the
# owner waits for an answer of the controller. ``SILENT_S`` is longer than the time limit of this
# wait.
SILENT_S = 30.0
END_S = 180.0  # seconds that the deployment may take to stop after draining


def serve(config: Config, start: Start | None = None) -> None:
    """Serve until a signal; see ``serve_in_processes`` and ``serve_until_signal``."""
    if config.recovery.keep_answers:
        serve_in_processes(config, start)
    else:
        serve_until_signal(config, start or deployment.start)


def serve_in_processes(config: Config, start: Start | None = None) -> None:
    """Serve until a signal, with an owner process and ingress processes. A process that dies is
    replaced.

    Call this before the process has a second thread.

    Args:
        start: a function that starts a deployment; None starts a deployment on Ray.

    Raises:
        ConfigError, DeviceError, ModelError: see ``open_service``.
        SystemExit: always raised at the end. Errors after the start are printed on stderr.
    """
    is_on_own_ray = start is None and ray_address() is None
    with open_service(config) as opened, _starter_of(opened.config, is_on_own_ray) as starter:
        config = opened.config
        restarts = RestartBudget(config.recovery.restarts_per_hour)
        start_owned = start or partial(deployment.start, starter=starter)
        ProcessLog("supervisor").open(config.logging, has_terminal=True)

        def own(signals: Signals, heartbeat: SharedHeartbeat) -> None:
            process_log = ProcessLog("owner")
            process_log.open(config.logging, has_terminal=True)
            with ExitStack() as stack:
                if process_log.folder is not None:
                    path = process_log.folder / f"ray-{os.getpid()}.log"
                    stack.enter_context(native_output_in(path))
                own_deployment(opened, start_owned, signals, heartbeat, restarts)

        def serve_clients(replica: int, life: int, beat: Beat, link: HolderLink) -> None:
            ProcessLog("ingress").open(config.logging, has_terminal=True)
            serve_http(opened, life, beat, link, replica)

        def disown() -> None:
            opened.directory.disown()
            starter.disown()

        _allow_connections(config.serve.max_connections * config.serve.replicas)
        supervisor = Supervisor(
            own,
            [partial(serve_clients, replica) for replica in range(config.serve.replicas)],
            restarts,
            silent_s=max(SILENT_S, 2 * config.timeouts.link_s),
            end_s=config.serve.drain_s + END_S,
            end_started=starter.end_started,
            on_fork=disown,
        )
        raise SystemExit(supervisor.run())


def _allow_connections(max_connections: int) -> None:
    """Raise the limit of open files, and warn if the system's limit is too low."""
    allowed = allow_connections(max_connections)
    if allowed.max_kept < max_connections:
        log.warning(
            "serve.max_connections is %d, but only %d connections may be open, and %d of them "
            "outlive an ingress that dies: raise the limit of open files (ulimit -n) or lower "
            "serve.max_connections",
            max_connections,
            allowed.max_open,
            allowed.max_kept,
        )


@contextmanager
def _starter_of(config: Config, is_on_own_ray: bool) -> Iterator[ProcessStarter]:
    """Yield the object that starts the processes of the service's Ray.

    The object can be a fork server. A fork server loads its libraries before Ray starts, and
    outlives the owner of the deployment.
    """
    if not is_on_own_ray:  # a node that joins a cluster may have no device
        yield ProcessStarter()
        return
    prepare_ray_environment(is_local=True)
    with closing(choose_starter(config)) as starter:
        starter.command(config)
        yield starter


def serve_until_signal(config: Config, start: Start = deployment.start) -> None:
    """Serve until a signal. This process is both the owner and the ingress.

    The death of this process ends the service.

    Raises:
        ConfigError, ModelError: see ``open_service``.
        DistAclGraphError: the deployment did not start, the deployment died, or the ingress failed.
        SystemExit: a signal arrived before anything was served. The code is 128 plus the signal's
            number.
    """
    with open_service(config) as opened, Signals() as signals:
        ProcessLog("service").open(opened.config.logging, has_terminal=True)
        ingress = _IngressThread(opened, signals)
        try:
            own_deployment(opened, start, signals, SharedHeartbeat(SILENT_S))
        finally:
            ingress.end()


class _IngressThread:
    """Serves HTTP on a thread, from construction until ``end``."""

    def __init__(self, opened: Opened, signals: Signals) -> None:
        self._opened = opened
        self._signals = signals
        self._failure: BaseException | None = None
        self._read, self._write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="ingress")
        self._thread.start()

    def end(self) -> None:
        """End the thread. If an error has already ended the thread, raise this error."""
        os.close(self._write)
        self._thread.join()
        os.close(self._read)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            serve_http(self._opened, self._read, beat=lambda *, serves=True: None)
        except BaseException as e:
            self._failure = e
            self._signals.stop()
