"""The ranks of a lockstep group as processes of their own, without Ray; a test is their engine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from dist_aclgraph.config import Config
from dist_aclgraph.environment import child_environment
from dist_aclgraph.planning.commands import GraphAction, GraphCommand
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.steps.step import (
    StepPlan,
    StepResult,
    encoder,
    from_worker_decoder,
    to_worker_decoder,
)
from tests.forks import forks

STEP_S = 60.0  # until a rank counts as stuck


@dataclass(frozen=True)
class RankStep:
    """What one rank did in a step.

    Attributes:
        num_collectives: that ran on its device.
    """

    result: StepResult
    num_collectives: int


class RankProcesses:
    """Sends steps to all ranks, as an engine would."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def step(self, plan: StepPlan) -> list[RankStep]:
        """Let all ranks run a step; return what each of them did.

        Raises:
            AssertionError: a rank did not answer.
        """
        message = encoder.encode(plan)
        for pipe in self._pipes:
            pipe.send_bytes(message)
        done = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(STEP_S), f"rank {rank} is stuck in step {plan.step}"
            result = from_worker_decoder.decode(pipe.recv_bytes())
            assert isinstance(result, StepResult)
            done.append(RankStep(result, int.from_bytes(pipe.recv_bytes(), "little")))
        return done


@contextmanager
def rank_processes(
    config: Config, plan: GraphPlan, num_blocks: int, max_len: int
) -> Iterator[RankProcesses]:
    """Start every rank of ``config``, whose graphs are those of ``plan``, and end them.

    They are forked from a process that has loaded torch and torch_npu, most of a start.
    """
    context = forks()
    size = config.parallel.world_size
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"file://{Path(directory) / 'rendezvous'}"
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (config, plan, num_blocks, max_len, rank, rendezvous, theirs)
            process = context.Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            yield RankProcesses(pipes)
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.join(10)
                process.kill()


def _run_rank(
    config: Config,
    plan: GraphPlan,
    num_blocks: int,
    max_len: int,
    rank: int,
    rendezvous: str,
    pipe: Connection,
) -> None:
    os.environ.update(child_environment(config), ASCEND_RT_VISIBLE_DEVICES=str(rank))
    from dist_aclgraph.actors.worker import Worker
    from dist_aclgraph.device import emulator

    worker = Worker(config, epoch=0)
    worker.join(rank, rank, config.parallel.world_size, rendezvous)
    worker.load()
    query_len = config.speculative.num_tokens + 1
    smallest = BatchDescriptor(query_len, 1, query_len, "FULL")  # where no graph is captured
    worker.make_runner(num_blocks, max_len, list(plan.capture_order) or [smallest])
    moves: tuple[GraphAction, ...] = ("prepare", "capture", "commit")
    for graph in plan.capture_order:
        for move in moves:
            answer = worker.carry_out(GraphCommand(0, 0, move, graph))
            assert answer.failure is None, answer.message
    worker.adopt(plan)
    while True:
        try:
            message = to_worker_decoder.decode(pipe.recv_bytes())
        except EOFError:
            return
        assert isinstance(message, StepPlan)
        before = emulator.counters()["collectives"]
        result = worker.execute(message)
        pipe.send_bytes(encoder.encode(result))
        pipe.send_bytes((emulator.counters()["collectives"] - before).to_bytes(8, "little"))
        worker._runner.prepare_next(pipe.poll)
