"""``dist-aclgraph serve``: Ray, the application and its proxy, up to the last closed port."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from functools import partial
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from dist_aclgraph.actors import deployment
from dist_aclgraph.actors.engine_client import StartDeployment
from dist_aclgraph.actors.llm import start_on_ray
from dist_aclgraph.actors.local_ray import LocalRay, start_ray
from dist_aclgraph.cli.plan_report import plan_report
from dist_aclgraph.cli.progress import StartProgress
from dist_aclgraph.config import Config
from dist_aclgraph.environment import prepare_ray_environment
from dist_aclgraph.errors import ConfigError, EngineUnavailableError

APP_NAME = "dist_aclgraph"
SERVE_LOGGING = {"log_level": "WARNING", "enable_access_log": False}
TABLE_KEYS = ("graph", "streams", "bytes")
POLL_S, WATCH_S = 0.2, 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve_until_signal(config: Config, start: StartDeployment = start_on_ray) -> None:
    """Serve until a signal; then drain and stop everything that was started.

    Raises:
        ConfigError: the port is taken, or the configuration does not fit the model.
        DistAclGraphError: the deployment did not come up, or died.
    """
    _check_port(config.serve.host, config.serve.port)
    plan_report(config)  # finds what does not fit the model, before anything is started
    stopping = threading.Event()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    console = Console(stderr=True)
    prepare_ray_environment()
    owns_ray = not ray.is_initialized()
    local_ray: LocalRay | None = None
    try:
        if owns_ray:
            console.print("Starting Ray ...")
            local_ray = start_ray(config)
            if local_ray is not None:
                local_ray.watch(partial(_end_at_once, local_ray))
        # After ray.init, which installs a handler of its own for SIGTERM.
        for number in SIGNALS:
            signal.signal(number, lambda *_: stopping.set())
        _serve(config, start, stopping, console, local_ray)
    finally:
        for number in SIGNALS:  # a second Ctrl-C must not cut the tear-down short
            signal.signal(number, signal.SIG_IGN)
        if local_ray is not None:
            local_ray.unwatch()
        _stop(config, owns_ray)
        for number, handler in before.items():
            signal.signal(number, handler)
        console.print("Stopped.")


def _serve(
    config: Config,
    start: StartDeployment,
    stopping: threading.Event,
    console: Console,
    local_ray: LocalRay | None,
) -> None:
    from ray import serve

    from dist_aclgraph.serve.app import make_app

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": config.serve.host, "port": config.serve.port},
        logging_config=SERVE_LOGGING,
    )
    if local_ray is not None:
        local_ray.watch_proxy(partial(_end_at_once, local_ray))
    console.print(f"Bringing up {config.name} on {config.parallel.world_size} NPUs ...")
    target = serve.RunTarget(
        make_app(config, start), name=APP_NAME, route_prefix="/", logging_config=SERVE_LOGGING
    )
    (handle,) = serve.run_many([target], wait_for_applications_running=False)
    with StartProgress(console) as show:
        while not stopping.wait(POLL_S):
            status = serve.status().applications[APP_NAME]
            if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise EngineUnavailableError(f"the deployment did not come up: {_cause(status)}")
            if status.status == "RUNNING":
                break
            if (progress := deployment.starting_progress()) is not None:
                show(progress)
    if stopping.is_set():
        return
    announce(config, handle.report.remote().result(timeout_s=30), Console())
    while not stopping.wait(WATCH_S):
        if failure := handle.failure.remote().result(timeout_s=30):
            raise EngineUnavailableError(f"the service has ended: {failure}")
    console.print("Draining ...")
    handle.stop.remote().result(timeout_s=config.serve.drain_s + config.timeouts.stop_s + 60)


def _end_at_once(local_ray: LocalRay, death: str) -> None:
    """Without its daemons, Ray's calls may hang, an orderly stop among them."""
    local_ray.kill()
    print(f"error: {death}", file=sys.stderr, flush=True)
    os._exit(1)


def _stop(config: Config, owns_ray: bool) -> None:
    if not ray.is_initialized():
        return
    from ray import serve

    try:
        serve.delete(APP_NAME)
        if owns_ray:
            serve.shutdown()
    finally:
        if owns_ray:
            ray.shutdown()


def _cause(status: Any) -> str:
    """The last line of a traceback says what happened; the rest says where."""
    messages = [status.message, *(d.message for d in status.deployments.values())]
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("dist_aclgraph.errors.")]
    return str((ours or lines or ["no reason given"])[-1])


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            raise ConfigError(
                f"serve.port is {port}: {host}:{port} cannot be bound ({e.strerror}); "
                "choose another with serve.port=N"
            ) from e


def announce(config: Config, report: dict[str, Any], console: Console) -> None:
    """Print the device, the plan's buckets, and how to ask a first question."""
    count = config.parallel.world_size
    device = report.get("device") or "NPU"
    console.print(f"{config.name} is served on {count} x {device}", highlight=False)
    for reason in report.get("mode_reasons", ()):
        console.print(reason)
    plan = report.get("plan")
    if plan:
        reasons = "; ".join(plan.get("reasons", ()))
        console.print(f"Graph plan {plan['version']} ({plan['hash'][:12]}): {reasons}")
        table = Table(*TABLE_KEYS)
        for bucket in report.get("buckets", []):
            table.add_row(*(f"{bucket[key]:,}" if key == "bytes" else str(bucket[key])
                            for key in TABLE_KEYS))  # fmt: skip
        console.print(table)
        console.print(
            f"Bytes are what a bucket added to the pool that all share: "
            f"{report['pool_bytes']:,} in all."
        )
    else:
        console.print("No graphs: every step runs eagerly.")
    url = f"http://{config.serve.host}:{config.serve.port}"
    message = {"role": "user", "content": "Count from 3 to 9."}
    body = json.dumps({"model": config.name, "temperature": 0, "messages": [message]})
    console.print(f"Ready at {url}/v1 -- try:")
    # Not through rich, which would wrap a line that is there to be copied.
    print(f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    sys.stdout.flush()
