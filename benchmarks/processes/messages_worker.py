"""The program of the workers of ``make bench-messages``. A worker replies to every plan at once.

The workers are forked from one process, as in a deployment that has more workers than cores. So the
workers share memory pages, and these pages stay in the CPU's cache between two steps.
"""

from __future__ import annotations

import json
import os
import socket
import sys

from dist_aclgraph.actors.wire.addresses import Endpoint
from dist_aclgraph.actors.wire.local_steps import LocalEngine, SocketFile
from dist_aclgraph.actors.wire.remote_steps import Endpoints, RemoteEngine
from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.steps.step import RankPlan, StepResult, encoder, to_worker_decoder

BATCH = 32
ANSWER = b"a" * 64  # the reply of a worker that does not decode the plans
READ_BYTES = 1 << 16


def written(address: SocketFile | Endpoints | str) -> str:
    """Return an address as a line of text, which ``main`` can read."""
    if isinstance(address, str):
        return json.dumps({"bare": address})
    if isinstance(address, SocketFile):
        return json.dumps({"path": address.path, "token": address.token})
    return json.dumps({"plans": address.plans.url, "results": address.results.url})


def work(rank: int, line: str) -> None:
    """Reply to plans like a worker, until a message arrives that is not a plan."""
    address = json.loads(line)
    if "bare" in address:
        answer_anything(address["bare"])
    elif "path" in address:
        answer_plans(rank, LocalEngine(SocketFile(**address)))
    else:
        ends = Endpoints(Endpoint(address["plans"]), Endpoint(address["results"]))
        answer_plans(rank, RemoteEngine(ends))


def answer_plans(rank: int, engine: LocalEngine | RemoteEngine) -> None:
    tokens = pack_ints([1] * BATCH) if rank == 0 else b""
    while isinstance(plan := to_worker_decoder.decode(engine.receive()), RankPlan):
        engine.send(encoder.encode(StepResult(plan.epoch, plan.step, rank, tokens)))
    engine.close()


def answer_anything(path: str) -> None:
    """Reply to every message with a few bytes, until the connection ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        while connection.recv(READ_BYTES):
            connection.send(ANSWER)


def main() -> None:
    """Fork a worker for each line of the input, print the process ids, and wait for all workers."""
    pids = []
    for rank, line in enumerate(sys.stdin.read().splitlines()):
        if not (pid := os.fork()):
            work(rank, line)
            os._exit(0)
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
