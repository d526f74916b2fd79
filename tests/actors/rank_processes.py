"""Runs the workers of a lockstep group in forked processes, without Ray."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dist_aclgraph.actors.controller.startup import EPOCH
from dist_aclgraph.actors.wire.step_channel import ChannelAddress
from dist_aclgraph.actors.worker.rank_facts import JoinedDevice, WorkerInfo
from dist_aclgraph.actors.worker.worker import Worker
from dist_aclgraph.actors.worker.worker_group import WorkerGroup
from dist_aclgraph.config import Config
from dist_aclgraph.environment import child_environment
from dist_aclgraph.steps.copies import BlockCopyJobs, CopyJob
from dist_aclgraph.steps.step import (
    RankPlan,
    StepPlan,
    StepResult,
    encoder,
    from_worker_decoder,
    to_worker_decoder,
)
from dist_aclgraph.topology import GroupRank, WorldRank
from tests.forks import begin, forks

ANSWER_S = 120.0  # seconds after which a rank that has not answered a call counts as stuck
END_S = 10.0  # seconds that a process has to end by itself before it is killed


@dataclass(frozen=True)
class RankStep:
    """The result of a step on one rank.

    Attributes:
        num_collectives: number of collectives that ran on the rank's device.
        counted: three counts since the end of the previous step: waits of the host for the device,
            launches of operators on the AI CPU, and launches with unaligned views.
        slow: names of the operators that ran on the AI CPU or with unaligned views.
    """

    result: StepResult
    num_collectives: int
    counted: dict[str, int]
    slow: tuple[str, ...]


QUERY_S = 0.0005
_COUNTED = ("host_syncs", "ai_cpu", "unaligned_views")


class RankProcesses(WorkerGroup):
    """Calls methods of the workers over pipes, and sends steps to the workers as an engine does."""

    def call(
        self,
        method: str,
        phase: str,
        timeout_s: float,
        arguments: Callable[[int], tuple[Any, ...]] | None = None,
    ) -> list[Any]:
        """Call a method on all workers and return their answers in rank order.

        Raises:
            AssertionError: a rank did not answer, or its process has ended.
            Exception: the first error of a worker. The call then does not wait for the other
                workers.
        """
        for index, pipe in enumerate(self.workers):
            pipe.send((method, arguments(index) if arguments else ()))
        index_of = {pipe: index for index, pipe in enumerate(self.workers)}
        answers: dict[int, Any] = {}
        while len(answers) < len(self.workers):
            waiting = [pipe for pipe, index in index_of.items() if index not in answers]
            ready = connection.wait(waiting, ANSWER_S)
            silent = [self.ranks[index_of[pipe]] for pipe in waiting]
            assert ready, f"{method} was not answered by rank {silent} in {phase}"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answer = pipe.recv()
                if isinstance(answer, BaseException):
                    raise answer
                answers[index_of[pipe]] = answer
        return [answers[index] for index in range(len(self.workers))]

    def join(self, rendezvous: str, timeout_s: float) -> list[JoinedDevice]:
        """Open all devices, and join the ranks in one HCCL world; return the devices."""
        return self.call(
            "join",
            "JOINING",
            timeout_s,
            lambda i: (self.ranks[i], GroupRank(i), rendezvous),
        )

    def step(self, plan: StepPlan) -> list[RankStep]:
        """Let all ranks run one step and wait until it has ended; return each rank's result."""
        done = []
        for answer, *counted in self.call("step", "SERVING", ANSWER_S, self._parts(plan)):
            result = from_worker_decoder.decode(answer)
            assert isinstance(result, StepResult)
            done.append(RankStep(result, *counted))
        return done

    def launch(self, plan: StepPlan) -> list[StepResult]:
        """Let all ranks queue a step behind the previous step; return the results of the previous
        step if they exist.
        """
        return self._results("launch", self._parts(plan))

    def pause(self) -> list[StepResult]:
        """Let all ranks finish the step in flight; return its results."""
        return self._results("pause", lambda _: ())

    def copy(self, jobs: Sequence[tuple[CopyJob, ...]]) -> list[tuple[tuple[int, int], ...]]:
        """Let all ranks begin new copy jobs and continue earlier ones; return, for each rank, the
        jobs that have ended.

        Args:
            jobs: the new jobs of each data-parallel rank.
        """
        ranks_per_batch = len(self.workers) // len(jobs)
        return self.call(
            "copy",
            "SERVING",
            ANSWER_S,
            lambda index: (encoder.encode(BlockCopyJobs(0, 0, jobs[index // ranks_per_batch])),),
        )

    def _parts(self, plan: StepPlan) -> Callable[[int], tuple[bytes]]:
        """Return a function that maps a rank's index to the message for this rank."""
        ranks_per_batch = len(self.workers) // len(plan.batches)
        return lambda index: (encoder.encode(plan.for_rank(index // ranks_per_batch)),)

    def _results(
        self, method: str, arguments: Callable[[int], tuple[Any, ...]]
    ) -> list[StepResult]:
        answers = self.call(method, "SERVING", ANSWER_S, arguments)
        results = [from_worker_decoder.decode(found) for answer in answers for found in answer]
        assert len(results) in (0, len(answers))
        return results


@contextmanager
def rank_processes(config: Config, at_ranks: Sequence[Config] = ()) -> Iterator[RankProcesses]:
    """Within this context, one process runs for each rank of the group of ``config``.

    Args:
        at_ranks: the configuration of each rank, if the configurations differ, for example on
            several nodes.
    """
    size = config.parallel.world_size
    context = forks()
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        arguments = (at_ranks[rank] if at_ranks else config, rank, theirs)
        process = context.Process(target=_run_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    infos = [
        WorkerInfo("", "127.0.0.1", socket.gethostname(), process.pid, (rank,))
        for rank, process in enumerate(processes)
    ]
    try:
        nothing: Any = None  # no controller places these workers
        ranks = tuple(map(WorldRank, range(size)))
        yield RankProcesses(ranks, pipes, request=nothing, bundles=nothing, infos=infos)
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(END_S)
    finally:
        for process in processes:
            process.kill()


@contextmanager
def rendezvous() -> Iterator[str]:
    """Yield the URL of a file. The ranks exchange their addresses in this file to join one HCCL
    world.
    """
    with tempfile.TemporaryDirectory() as directory:
        yield f"file://{Path(directory) / 'rendezvous'}"


def _answer(worker: Worker, pipe: Connection) -> None:
    """Carry out the calls that arrive in ``pipe``, one after another, until the calling process has
    ended.
    """
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(worker, method)(*arguments))
        except Exception as e:
            pipe.send(e)


def _run_rank(config: Config, rank: int, pipe: Connection) -> None:
    begin({**child_environment(config), "ASCEND_RT_VISIBLE_DEVICES": str(rank)})
    from dist_aclgraph.device import emulator
    from dist_aclgraph.device.npu import runtime

    worker = Worker(config, EPOCH)

    at_last_step = dict.fromkeys(_COUNTED, 0)
    slow_at_last_step: Counter[str] = Counter()

    def step(message: bytes) -> tuple[bytes, int, dict[str, int], tuple[str, ...]]:
        plan = to_worker_decoder.decode(message)
        assert isinstance(plan, RankPlan)
        before = emulator.counters()["collectives"]
        results: list[StepResult] = []
        worker.launch(plan, results.append)
        result = results[-1] if results else worker._running.runner.finish()
        # The device computes the drafts after the step's results. If the host waited for the
        # drafts, the counters would count this wait. Polls are not counted, so this loop polls
        # until the drafts exist.
        while not runtime().current_stream().query():
            time.sleep(QUERY_S)
        now = emulator.counters()
        counted = {name: now[name] - at_last_step[name] for name in _COUNTED}
        at_last_step.update({name: now[name] for name in _COUNTED})
        slow = Counter(emulator.ai_cpu_operators()) + Counter(emulator.unaligned_operators())
        names = tuple(sorted(slow - slow_at_last_step))
        slow_at_last_step.update(slow - slow_at_last_step)
        return encoder.encode(result), now["collectives"] - before, counted, names

    def launch(message: bytes) -> list[bytes]:
        plan, results = to_worker_decoder.decode(message), list[bytes]()
        assert isinstance(plan, RankPlan)
        worker.launch(plan, lambda result: results.append(encoder.encode(result)))
        return results

    def pause() -> list[bytes]:
        return [encoder.encode(worker._running.runner.finish())]

    def copy(message: bytes) -> tuple[tuple[int, int], ...]:
        jobs = to_worker_decoder.decode(message)
        assert isinstance(jobs, BlockCopyJobs)
        with worker._running.joined.npu.launching():
            return worker._copy_blocks(jobs).ended

    def kv_bytes() -> int:
        """Return the number of bytes of the decoder's caches."""
        caches = [vars(cache).values() for cache in worker._running.runner.caches.decoder]
        return sum(tensor.nbytes for tensors in caches for tensor in tensors)

    def serve(address: ChannelAddress) -> None:
        """Run the step loop, and answer calls on another thread. Never returns."""
        threading.Thread(target=_answer, args=(worker, pipe), daemon=True).start()
        worker.run_loop(address)
        os._exit(0)

    own: dict[str, Callable[..., Any]] = {
        "step": step,
        "launch": launch,
        "pause": pause,
        "copy": copy,
        "kv_bytes": kv_bytes,
        "counters": emulator.counters,
        "serve": serve,
    }
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((own.get(method) or getattr(worker, method))(*arguments))
        except Exception as e:
            pipe.send(e)
            return
        if method == "step":
            worker._running.runner.prepare_next(pipe.poll)
