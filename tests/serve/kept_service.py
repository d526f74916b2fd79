"""Runs a supervisor and an ingress, and prints the service's port. The engine runs in another
process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.host.liveness import SharedHeartbeat
from dist_aclgraph.actors.wire.addresses import Address, Endpoint
from dist_aclgraph.cli.signals import Signals
from dist_aclgraph.cli.supervise import Supervisor
from dist_aclgraph.config import load_config
from dist_aclgraph.logs import ProcessLog
from dist_aclgraph.planning.restarts import Backoff, RestartBudget
from dist_aclgraph.serve.api import make_api
from dist_aclgraph.serve.http.front import Front
from dist_aclgraph.serve.http.server import HttpServer, listen
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.resume.holder import HolderLink
from dist_aclgraph.serve.resume.record import ConnectionRecord
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.serve.fake_engine import NODE, TOKEN

CONFIG = Path(__file__).parents[2] / "configs" / "tiny-qwen3.yaml"


def main(engine_url: str, limit: str, trap: str, overrides: str) -> int:
    """Run the service.

    Args:
        limit: path of a file that contains the maximum context length. Without this file, the
            ingress does not serve.
        trap: path of a file. An ingress that reads bytes while this file exists removes the file
            and dies.
        overrides: dotted keys of the configuration with their values, as JSON.
    """
    config = load_config(CONFIG, json.loads(overrides))
    tokenizer = Tokenizer(config.model)
    listener = listen("127.0.0.1", 0)

    def own(signals: Signals, heartbeat: SharedHeartbeat) -> None:
        while not signals.wait(0.1):
            heartbeat.beat()

    def serve_http(life: int, beat: Callable[[], None], link: HolderLink | None) -> None:
        if config.logging.access:
            ProcessLog("ingress").open(config.logging)
        address = Address(NODE, Endpoint(engine_url), Endpoint(engine_url))
        client = EngineClient([address], TOKEN, node_id=NODE, link_s=5.0)
        front = Front("the test is starting")
        server = HttpServer(config.serve, listener, beat, link)
        server.start(front)
        while limit and not Path(limit).exists():
            time.sleep(0.05)
        max_len = int(Path(limit).read_text()) if limit else config.max_model_len
        of_now = config.model_copy(update={"max_model_len": max_len})
        api = make_api(ApiState(of_now, tokenizer, client))
        server.let_in(lambda: front.open(api))
        select.select([life], [], [])
        server.stop()
        client.close()

    take_read = ConnectionRecord.take_read

    def die_or_take(record: ConnectionRecord, num_bytes: int) -> bytes:
        if trap and Path(trap).exists():
            Path(trap).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return take_read(record, num_bytes)

    ConnectionRecord.take_read = die_or_take  # type: ignore[method-assign]
    print(listener.getsockname()[1], flush=True)
    supervisor = Supervisor(
        own,
        [serve_http],
        RestartBudget(1000),
        60.0,
        60.0,
        make_backoff=lambda: Backoff(first_s=0.0),
    )
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
