"""Measures the host time of an engine's own work: ``python -m benchmarks.scheduler``.

All requests decode in every step. There are no workers, and no message is sent. Three parts are
measured separately: the scheduler; the encoding of its plans; and the encoding of a message with
the step's tokens for each client.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from dist_aclgraph.actors.engine.recipients import Recipients
from dist_aclgraph.actors.host.liveness import Silence
from dist_aclgraph.actors.wire.client_links import ClientLink
from dist_aclgraph.actors.wire.messages import Deltas
from dist_aclgraph.actors.wire.messages import encoder as client_encoder
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.planning.buckets import GraphFamily, capture_sizes
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.scheduler.outputs import StepOutputs
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.step import RowSampling, StepPlan, StepResult, encoder

BLOCK_SIZE = 128
PROMPT_TOKENS = 100


def make_scheduler(
    num_reqs: int,
    num_steps: int,
    *,
    num_waiting: int = 0,
    num_clients: int = 1,
    num_ranks: int = 1,
    tp: int = 1,
    spread: int = 0,
) -> tuple[Scheduler, Recipients]:
    """Return a scheduler whose requests all decode for ``num_steps`` steps, and the recipients of
    its outputs.

    Args:
        num_reqs: number of running requests on each of the ``num_ranks`` data-parallel ranks.
        num_waiting: number of waiting requests.
        spread: the prompt of request i has ``i % (spread + 1)`` additional tokens. So the KV blocks
            of different requests do not become full in the same step.
    """
    length = PROMPT_TOKENS + spread + num_steps + 100
    num_running = num_reqs * num_ranks
    buckets = capture_sizes(num_reqs, num_reqs)
    plan = GraphPlan(
        version=1,
        mode="FULL_DECODE_ONLY",
        families=(GraphFamily(run_mode="FULL", query_len=1, buckets=buckets),),
        max_num_seqs=num_reqs,
        budget_model="legacy-last",
    )
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=num_reqs,
            max_num_batched_tokens=8192,
            max_waiting=num_running + num_waiting,
        ),
        [
            BlockPool((length // BLOCK_SIZE + 2) * num_reqs + 1, BLOCK_SIZE)
            for _ in range(num_ranks)
        ],
        GraphDispatcher(plan),
        max_model_len=length,
        tp=tp,
    )
    recipients = Recipients()
    links = [ClientLink(b"", str(i), Silence(1.0)) for i in range(num_clients)]
    for index in range(num_running + num_waiting):
        prompt = [3 + index] * (PROMPT_TOKENS + index % (spread + 1))
        sampling = RowSampling(num_prompt_tokens=len(prompt))
        request = Request(str(index), prompt, sampling, stop_token_ids=[2])
        request.key = recipients.add(request.request_id, links[index % num_clients], index)
        scheduler.add(request)
    return scheduler, recipients


def run_step(scheduler: Scheduler, token_ids: bytes) -> tuple[StepPlan, StepOutputs, int, int]:
    """Run one step. Return its plan, its outputs, and the CPU times of schedule() and update() in
    ns.
    """
    begin = time.thread_time_ns()
    plan = scheduler.schedule()
    middle = time.thread_time_ns()
    assert plan is not None
    num_samples = int(np.frombuffer(plan.batches[0].scheduled, dtype="<i4")[3::4].sum())
    result = StepResult(plan.epoch, plan.step, 0, token_ids[: num_samples * 4])
    before = time.thread_time_ns()
    outputs = scheduler.update([result])
    return plan, outputs, middle - begin, time.thread_time_ns() - before


def hand_out(recipients: Recipients, outputs: StepOutputs) -> int:
    """Encode a step's messages for clients. Return the CPU time of the encoding in nanoseconds."""
    begin = time.thread_time_ns()
    for _, deltas in recipients.hand_out(outputs):
        client_encoder.encode(Deltas(deltas, 1))
    return time.thread_time_ns() - begin


def measure(
    num_reqs: int, num_steps: int = 2000, *, num_waiting: int = 0, num_clients: int = 1
) -> dict[str, float]:
    """Return the CPU times of a step in microseconds.

    For the scheduler: median, mean and 99th percentile. For the encoding of plans: median. For the
    encoding of messages: median and 99th percentile.
    """
    scheduler, recipients = make_scheduler(
        num_reqs, num_steps, num_waiting=num_waiting, num_clients=num_clients
    )
    token_ids = np.full(num_reqs, 11, dtype="<i4").tobytes()
    for _ in range(50):
        run_step(scheduler, token_ids)
    schedule_ns, update_ns, encode_ns, output_ns = [], [], [], []
    for _ in range(num_steps):
        plan, outputs, scheduled, updated = run_step(scheduler, token_ids)
        begin = time.thread_time_ns()
        encoder.encode(plan.for_rank(0))
        encode_ns.append(time.thread_time_ns() - begin)
        schedule_ns.append(scheduled)
        update_ns.append(updated)
        output_ns.append(hand_out(recipients, outputs))
    totals = sorted(a + b for a, b in zip(schedule_ns, update_ns, strict=True))
    return {
        "schedule_us": statistics.median(schedule_ns) / 1e3,
        "update_us": statistics.median(update_ns) / 1e3,
        "total_us": statistics.median(totals) / 1e3,
        "total_mean_us": statistics.mean(totals) / 1e3,
        "total_p99_us": totals[len(totals) * 99 // 100] / 1e3,
        "encode_us": statistics.median(encode_ns) / 1e3,
        "output_us": statistics.median(output_ns) / 1e3,
        "output_p99_us": sorted(output_ns)[len(output_ns) * 99 // 100] / 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 256, 1024, 4096])
    parser.add_argument("--waiting", type=int, default=0, help="requests in the queue beside them")
    parser.add_argument("--clients", type=int, default=1, help="who share the requests")
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    for num_reqs in arguments.requests:
        times = measure(
            num_reqs,
            arguments.steps,
            num_waiting=arguments.waiting,
            num_clients=arguments.clients,
        )
        print(f"{num_reqs:4} rows ", *(f"{name} {value:7.1f}" for name, value in times.items()))


if __name__ == "__main__":
    main()
