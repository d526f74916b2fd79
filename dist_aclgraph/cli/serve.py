"""``dist-aclgraph serve``: one process that listens, starts a deployment, watches and stops it.

HTTP is served here, by uvicorn in a thread: the port is taken before anything is started, and
answers until everything is stopped, with a 503 where nothing else is true. Ray Serve has no part
in it: where a cluster is joined, its applications and its proxies stay as they are.
"""

from __future__ import annotations

import gc
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from dist_aclgraph.actors import deployment
from dist_aclgraph.actors.deployment_protocol import Deployment
from dist_aclgraph.cli.checks import check_deployment
from dist_aclgraph.cli.last_start import keep_report
from dist_aclgraph.cli.progress import StartProgress
from dist_aclgraph.config import Config
from dist_aclgraph.environment import ray_address
from dist_aclgraph.errors import ConfigError, EngineUnavailableError
from dist_aclgraph.serve.access import Access, read_access
from dist_aclgraph.serve.api import make_api
from dist_aclgraph.serve.front import Front
from dist_aclgraph.serve.http_server import HttpServer
from dist_aclgraph.serve.state import ApiState, open_state
from dist_aclgraph.text.tokenizer import Tokenizer

TABLE_KEYS = ("graph", "streams", "bytes")
POLL_S, CHECK_S, JOIN_S = 0.1, 1.0, 2.0
SILENT_S = 30.0  # a check of the deployment that takes longer has no answer
SIGNALS = (signal.SIGINT, signal.SIGTERM)

Start = Callable[..., Deployment]


class _Stopping(Exception):
    """A signal came while the deployment was being started."""


def serve_until_signal(config: Config, start: Start = deployment.start) -> None:
    """Serve until a signal; then drain and stop everything that was started.

    Raises:
        ConfigError: the port is taken, the service would be open to others without a key, or the
            configuration does not fit the model.
        DistAclGraphError: the deployment did not come up, or died.
        SystemExit: a signal came before anything was served; 128 and its number.
    """
    if config.serve.replicas > 1:
        raise ConfigError(
            f"serve.replicas is {config.serve.replicas}; `dist-aclgraph serve` is one process: "
            "leave it out, or use Ray Serve (`serve run dist_aclgraph:app`)"
        )
    access = read_access(config.serve, checks_host=True)
    server = HttpServer(config.serve)
    try:
        check_deployment(config)  # before anything is started
        tokenizer = Tokenizer(config.model)
        console = Console(stderr=True)
        front = Front("the service is starting")
        server.start(front)
        with _Signals() as signals:
            try:
                _serve(config, start, signals, front, access, tokenizer, console)
            finally:
                console.print("Stopped.")
    finally:
        server.stop()


def _serve(
    config: Config,
    start: Start,
    signals: _Signals,
    front: Front,
    access: Access,
    tokenizer: Tokenizer,
    console: Console,
) -> None:
    console.print(f"Starting {config.name} on {config.parallel.world_size} NPUs ...")
    with _started(config, start, signals, console) as running:
        state = open_state(config, tokenizer, running, node_id=running.node_id, ask=running.outlook)
        try:
            # What was imported and built so far is not looked through at every collection.
            gc.collect()
            gc.freeze()
            front.open(make_api(state, access))
            report = running.report()
            keep_report(config.name, report)
            announce(config, report, Console())
            _watch(state, running, signals)
            console.print("Draining ...")
            state.drain()
            front.close("the server is stopping")
        except BaseException as e:
            front.close(str(e) or "the server is stopping")
            raise
        finally:
            state.client.close()


@contextmanager
def _started(
    config: Config, start: Start, signals: _Signals, console: Console
) -> Iterator[Deployment]:
    """Start a deployment and stop it afterwards; a signal before it serves ends the process."""
    try:
        with StartProgress(console) as show:

            def report(progress: Any) -> None:
                signals.take_over()  # Ray has installed handlers of its own meanwhile
                if signals.received:
                    raise _Stopping
                show(progress)

            running = start(config, on_progress=report)
    except (_Stopping, SystemExit):  # Ray's own handler of SIGTERM exits, with another number
        raise SystemExit(128 + (signals.received or signal.SIGTERM)) from None
    try:
        signals.take_over()
        yield running
    finally:
        running.shut_down()


def _watch(state: ApiState, running: Deployment, signals: _Signals) -> None:
    """Return once a signal has come.

    Raises:
        EngineUnavailableError: the deployment serves no more; says why.
    """
    with _Checks(running) as checks:
        while not signals.wait(POLL_S):
            try:
                state.check()
                checks.raise_failure()
            except EngineUnavailableError as e:
                raise EngineUnavailableError(f"the service has ended: {_cause(running, e)}") from e


def _cause(running: Deployment, seen: EngineUnavailableError) -> EngineUnavailableError:
    """What the deployment knows of an end that its client has seen first."""
    try:
        running.check()
    except EngineUnavailableError as e:
        return e
    return seen


class _Checks:
    """Asks a deployment for its health in a thread: the question itself may hang with Ray."""

    def __init__(self, running: Deployment) -> None:
        self._running = running
        self._failure: EngineUnavailableError | None = None
        self._asked_s = time.monotonic()
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
        if self._failure is not None:
            raise self._failure
        if (silent_s := time.monotonic() - self._asked_s) > SILENT_S:
            raise EngineUnavailableError(f"Ray has not answered for {silent_s:.0f} s")

    def _run(self) -> None:
        while self._failure is None and not self._ended.wait(CHECK_S):
            try:
                self._running.check()
            except EngineUnavailableError as e:
                self._failure = e
            self._asked_s = time.monotonic()


class _Signals:
    """Remembers the first SIGINT or SIGTERM; the next ones must not cut the tear-down short."""

    def __init__(self) -> None:
        self.received = 0
        self._came = threading.Event()

    def __enter__(self) -> _Signals:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.take_over()
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take_over(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def wait(self, seconds: float) -> bool:
        """Return whether one has come, after so many seconds at the latest."""
        return self._came.wait(seconds)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        self._came.set()


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
        for warning in report.get("graph_warnings", ()):
            console.print(f"Warning: {warning}", highlight=False)
    else:
        console.print("No graphs: every step runs eagerly.")
    if "controller" in report:
        print(f"More groups, or fewer: {_scale_command(report)}")
    url = _url(config)
    message = {"role": "user", "content": "Count from 3 to 9."}
    body = json.dumps({"model": config.name, "temperature": 0, "messages": [message]})
    console.print(f"Ready at {url}/v1 -- try:")
    # Not through rich, which would wrap a line that is there to be copied.
    print(f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    sys.stdout.flush()


def _scale_command(report: dict[str, Any]) -> str:
    command = f"dist-aclgraph scale N --deployment {report['controller']}"
    if ray_address() is None:
        return f"{command} --ray {report['ray_address']}"
    return f"RAY_ADDRESS={report['ray_address']} {command}"


def _url(config: Config) -> str:
    host = f"[{config.serve.host}]" if ":" in config.serve.host else config.serve.host
    return f"http://{host}:{config.serve.port}"
