"""Ray Serve in front of a paced engine, for ``make bench-serve``: with Ray Serve's own proxy, which
is the default, or with HAProxy.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.processes.serve_engine import PacedDeployment, PacedEngine
from benchmarks.processes.serve_servers import (
    POLL_S,
    Server,
    free_port,
    pid_of,
    running,
    spawn,
    wait_for,
)
from dist_aclgraph.actors.host import processes
from dist_aclgraph.config import Config
from dist_aclgraph.environment import environment_with, take_over_environment

# Titles of the processes through which a token passes. Ray sets these titles.
ON_THE_WAY = ("ray::ProxyActor", "ray::ServeReplica:default:ingress", "haproxy")
SETTLED_S = 5.0
CORES = 4  # number of cores that Ray may assign; enough for all actors


@contextmanager
def ray_serve(config: Config, directory: Path, *, haproxy: bool = False) -> Iterator[Server]:
    """Run ``serve run dist_aclgraph:app`` with a paced engine instead of a deployment."""
    engine = PacedEngine(directory)
    found = PacedDeployment(engine.address, config.max_model_len or 4096)
    port, (ours, theirs) = free_port(), spawn.Pipe()
    process = spawn.Process(target=_serve, args=(config, found, port, haproxy, theirs))
    try:
        with running(process):
            wait_for(process, port, "/ready")
            title = "Ray Serve, HAProxy" if haproxy else "Ray Serve"
            yield Server(title, (port,), _settled(pid_of(process)), engine)
            ours.send(None)
            process.join()
    finally:
        engine.close()


def _serve(
    config: Config, found: PacedDeployment, port: int, haproxy: bool, stop: Connection
) -> None:
    # The variables are set before Ray is imported, because Ray reads the variables at import. Ray's
    # processes inherit the variables.
    with tempfile.TemporaryDirectory(prefix="haproxy-") as folder:
        if haproxy:
            take_over_environment(environment_with(_haproxy(folder)))
        import ray
        from ray import serve

        from dist_aclgraph.serve.app import make_app

        ray.init("local", num_cpus=CORES, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        start = _here(found, ray.get_runtime_context().get_node_id())
        serve.run(make_app(config, start))
        stop.recv()
        serve.shutdown()
        ray.shutdown()


def _haproxy(folder: str) -> dict[str, str]:
    """Return the environment variables that make Serve use HAProxy, with HAProxy's files in
    ``folder``.
    """
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
    }


@dataclass(frozen=True)
class _Found:
    deployment: PacedDeployment

    def __call__(self, config: Config, **options: Any) -> PacedDeployment:
        return self.deployment


def _here(found: PacedDeployment, node_id: str) -> Callable[..., PacedDeployment]:
    """Return a function that returns a copy of ``found``. The copy has the id of this Ray node."""
    return _Found(replace(found, address=replace(found.address, node_id=node_id), node_id=node_id))


def _settled(ancestor: int) -> tuple[int, ...]:
    """Return the ids of the processes through which a token passes. First, wait until these
    processes have not changed for ``SETTLED_S``. Serve replaces the HAProxy process when replicas
    appear.
    """
    found: tuple[int, ...] = ()
    since_s = time.monotonic()
    while time.monotonic() < since_s + SETTLED_S:
        if found != (now := tuple(_on_the_way(ancestor))):
            found, since_s = now, time.monotonic()
        time.sleep(POLL_S)
    return found


def _on_the_way(ancestor: int) -> Iterator[int]:
    for child in processes.children(ancestor):
        yield from _on_the_way(child)
        if _title(child).startswith(ON_THE_WAY):
            yield child


def _title(pid: int) -> str:
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return ""
    return title if title.startswith("ray::") else Path(title).name
