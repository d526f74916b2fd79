"""A worker of ``make bench-messages``, as a program: it answers every plan at once."""

from __future__ import annotations

import json
import sys

from dist_aclgraph.actors.addresses import Endpoint
from dist_aclgraph.actors.local_steps import LocalEngine, SocketFile
from dist_aclgraph.actors.remote_steps import Endpoints, RemoteEngine
from dist_aclgraph.ints import pack_ints
from dist_aclgraph.steps.step import StepPlan, StepResult, encoder, to_worker_decoder

BATCH = 32


def written(address: SocketFile | Endpoints) -> str:
    """Return an address as the line that ``main`` reads."""
    if isinstance(address, SocketFile):
        return json.dumps({"path": address.path, "token": address.token})
    return json.dumps({"plans": address.plans.url, "results": address.results.url})


def connect(line: str) -> LocalEngine | RemoteEngine:
    address = json.loads(line)
    if "path" in address:
        return LocalEngine(SocketFile(**address))
    return RemoteEngine(Endpoints(Endpoint(address["plans"]), Endpoint(address["results"])))


def main() -> None:
    """Answer until something else than a plan comes."""
    rank, engine = int(sys.argv[1]), connect(sys.stdin.readline())
    tokens = pack_ints([1] * BATCH) if rank == 0 else b""
    while isinstance(plan := to_worker_decoder.decode(engine.receive()), StepPlan):
        engine.send(encoder.encode(StepResult(plan.epoch, plan.step, rank, tokens)))
    engine.close()


if __name__ == "__main__":
    main()
