"""The program that simulates all workers of a group for ``make bench-scale``.

After every worker has received its plan, the program writes a line of text. Then it waits until it
can read a line, and lets every worker answer. So the engine's process can measure two times
separately: the time to send, and the time to receive.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import zmq

from dist_aclgraph.actors.wire.local_steps import LocalEngine, SocketFile
from dist_aclgraph.actors.wire.remote_steps import TOPIC, Endpoints
from dist_aclgraph.actors.wire.step_channel import ChannelAddress
from dist_aclgraph.arrays.ints import pack_ints, unpack_ints
from dist_aclgraph.steps.step import RankPlan, StepResult, encoder, to_worker_decoder

TOKEN = 11  # the token that every request gets in every step


class Worker(NamedTuple):
    """The connection of one worker."""

    receive: Callable[[], bytes]
    send: Callable[[bytes], Any]


def written(address: ChannelAddress) -> dict[str, Any]:
    """Return an address as a JSON value, which ``connect`` can read."""
    return {"is_file": isinstance(address, SocketFile), **msgspec.to_builtins(address)}


def connect(context: zmq.Context[zmq.Socket[bytes]], address: dict[str, Any]) -> Worker:
    if address.pop("is_file"):
        engine = LocalEngine(SocketFile(**address))
        return Worker(engine.receive, engine.send)
    ends = msgspec.convert(address, Endpoints)
    plans, results = context.socket(zmq.SUB), context.socket(zmq.PUSH)
    plans.setsockopt(zmq.SUBSCRIBE, TOPIC.pack(ends.dp_rank))
    ends.results.connect(results)
    ends.plans.connect(plans)
    return Worker(lambda: plans.recv()[TOPIC.size :], results.send)


def main() -> None:
    """Simulate the workers whose addresses are in the first line of the input. Stop at the first
    message that is no plan.
    """
    addresses = json.loads(sys.stdin.readline())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * len(addresses) + 1)
    workers = [connect(context, address) for address in addresses]
    while answers := [take(worker, rank) for rank, worker in enumerate(workers)]:
        print(flush=True)
        if None in answers:
            break
        sys.stdin.readline()
        for worker, answer in zip(workers, answers, strict=True):
            assert answer is not None
            worker.send(answer)
    context.destroy(linger=0)


def take(worker: Worker, rank: int) -> bytes | None:
    """Receive a worker's next message. If the message is a plan, return the worker's answer;
    otherwise return None.
    """
    plan = to_worker_decoder.decode(worker.receive())
    if not isinstance(plan, RankPlan):
        return None
    num_samples = int((unpack_ints(plan.batch.scheduled, 4)[:, 3] > 0).sum())
    return encoder.encode(StepResult(plan.epoch, plan.step, rank, pack_ints([TOKEN] * num_samples)))


if __name__ == "__main__":
    main()
