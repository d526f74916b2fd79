"""An engine's loop with its clients and with workers that have no model; it needs neither Ray nor
devices.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import zmq

from dist_aclgraph.actors.capture.graph_changes import GraphChanges
from dist_aclgraph.actors.capture.graph_transaction import GraphTransaction
from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.engine.engine_loop import EngineLoop
from dist_aclgraph.actors.engine.kv_events import KVEvents
from dist_aclgraph.actors.engine.resumption import Resumption, StopDevices
from dist_aclgraph.actors.wire.addresses import Endpoint, Place
from dist_aclgraph.actors.wire.client_links import ClientLinks
from dist_aclgraph.actors.wire.event_publisher import PublisherPlace
from dist_aclgraph.actors.wire.messages import (
    MAX_UNREAD_BYTES,
    EngineStatus,
    Hello,
    Submit,
    encoder,
    from_engine_decoder,
    protocol,
)
from dist_aclgraph.actors.wire.step_channel import StepReceiver, StepSender
from dist_aclgraph.arrays.ints import pack_ints, unpack_ints
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.kv.block_pool import HASH_BYTES, BlockPool
from dist_aclgraph.kv.events import CacheEvents
from dist_aclgraph.kv.look_ups import Files, LookUps
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.copies import BlockCopyJobs, CopiedBlocks, CopyJob
from dist_aclgraph.steps.step import (
    Pause,
    RankPlan,
    Resume,
    Resumed,
    RowSampling,
    StepResult,
)
from tests.deployments import Answer, greedy_params
from tests.plans import make_plan
from tests.unit.scheduler.fake_worker import FakeWorker

TOKEN, EPOCH, WAIT_S, STEP_S = "secret", 1, 60.0, 60.0
NUM_BLOCKS, BLOCK = 32, 16
NODE = "node"
VOCAB = 1000  # larger than every token id in the tests


class Group:
    """One lockstep group of fake workers.

    Args:
        fail_at: number of the step in which rank 0 reports an error.
        dp, tp: number of data-parallel ranks, and number of tensor-parallel ranks per data-parallel
            rank. If there are several ranks, they share the experts.
        num_drafts: number of draft tokens of each request per step; one draft token is accepted.
        lose_at: number of the step in which the last rank has more tokens than the experts'
            capacity. The results of this step are discarded.
        stall_at, stall_s: number of the step that stalls, and the duration of its stall.
        link_s: time without messages after which a client counts as lost.
        max_unread_bytes: largest number of bytes that can wait for one client.
        turn_s: time limit of one turn of the loop, in seconds.
        clients_host: address at which clients on other nodes connect to the engine.
        is_held: function that returns whether the engine holds its lease.
        fault_at: number of the step in which rank 0's device stops because a link fails. The other
            ranks then wait for this device.
        stop: function that stops the devices of all ranks.
        events_at: address at which the changes of the prefix caches are published.
        fetches: used instead of a ``BlockFetches``.
        late_decisions: used instead of ``LateDecisions``.
        files: used instead of the files of KV blocks, by hash; None if no copies are kept.
        copy_messages: number of messages that a worker needs for a copy job.

    Attributes:
        received: the messages that rank 0 received.
    """

    def __init__(
        self,
        directory: Path,
        fail_at: int | None = None,
        *,
        dp: int = 1,
        tp: int = 1,
        num_drafts: int = 0,
        lose_at: int | None = None,
        stall_at: int | None = None,
        stall_s: float = 0.0,
        link_s: float = WAIT_S,
        turn_s: float = STEP_S,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        max_model_len: int = 128,
        num_blocks: int = NUM_BLOCKS,
        clients_host: str | None = None,
        is_held: Callable[[], bool] = lambda: True,
        steps_in_flight: int = 2,
        fault_at: int | None = None,
        stop: StopDevices = lambda timeout_s, check: {},
        events_at: PublisherPlace | None = None,
        fetches: Any = None,
        late_decisions: Any = None,
        files: dict[bytes, Any] | None = None,
        copy_messages: int = 1,
    ) -> None:
        self.received: list[Any] = []
        self._files = {} if files is None else files
        self._copy_messages = copy_messages
        self.ranks = tuple(range(dp * tp))
        self.later: list[RawClient] = []  # ``close`` of this class closes these clients
        place = Place(NODE, str(directory))
        channel = StepSender(self.ranks, place, ranks_per_batch=tp)
        self._fault_at = fault_at
        self._fail_at, self._lose_at, self._tp = fail_at, lose_at, tp
        self._num_drafts, self._num_blocks = num_drafts, num_blocks
        self._steps_in_flight = steps_in_flight
        self._stall_at, self._stall_s = stall_at, stall_s
        self._workers = [
            threading.Thread(
                target=self._work, args=(channel.address_for(NODE, rank), rank), daemon=True
            )
            for rank in self.ranks
        ]
        for worker in self._workers:
            worker.start()
        channel.wait_for_workers(WAIT_S, lambda: None)
        query_len = num_drafts + 1
        plan = make_plan(query_len, 2 * query_len, 4 * query_len, query_len=query_len)
        clients = ClientLinks(replace(place, host=clients_host), TOKEN, link_s, max_unread_bytes)
        self.clients_at = clients.address
        self.address = self.clients_at.seen_from(NODE)
        dispatcher = GraphDispatcher(plan)
        caches = [None if events_at is None else CacheEvents(BLOCK) for _ in range(dp)]
        kept = [cache for cache in caches if cache is not None]
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
            [BlockPool(num_blocks, BLOCK, prefix_cache=True, events=cache) for cache in caches],
            dispatcher,
            max_model_len=max_model_len,
            epoch=EPOCH,
            num_drafts=num_drafts,
            tp=tp,
            choose_exchange=lambda num_tokens: "all_to_all" if dp > 1 else None,
            look_ups=None if files is None else LookUps(Files(files.__contains__)),
        )
        self.loop = EngineLoop(
            self.scheduler,
            channel,
            clients,
            vocab_size=VOCAB,
            step_timeout_s=STEP_S,
            turn_timeout_s=turn_s,
            is_held=is_held,
            steps_in_flight=steps_in_flight,
            resumption=Resumption(channel, self.ranks, stop, WAIT_S),
            changes=GraphChanges(dispatcher, GraphTransaction(self, WAIT_S, WAIT_S), {}),
            report=dict,
            kv_events=None if events_at is None else KVEvents(kept, events_at),
            fetches=fetches,
            late_decisions=late_decisions,
        )
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()

    def carry_out(self, *_: Any) -> Any:
        raise AssertionError("no graph changes here")

    def _work(self, address: Any, rank: int) -> None:
        worker = FakeWorker(
            self._num_blocks,
            BLOCK,
            num_drafts=self._num_drafts,
            accept=lambda: min(1, self._num_drafts),
        )
        receiver = StepReceiver(address)
        in_flight: deque[StepResult] = deque()
        copying: deque[tuple[CopyJob, ...]] = deque(((),) * (self._copy_messages - 1))
        epoch, is_stopped = EPOCH, False
        try:
            while (plan := receiver.receive(epoch)) is not None:
                if rank == 0:
                    self.received.append(plan)
                if isinstance(plan, BlockCopyJobs):
                    copying.append(plan.jobs)
                    jobs = copying.popleft()
                    ended = tuple((job.number, self._copy(job, worker)) for job in jobs)
                    receiver.send(CopiedBlocks(epoch, plan.number, rank, ended))
                    continue
                if isinstance(plan, Resume):
                    worker.resume(len(in_flight))
                    in_flight.clear()
                    epoch, is_stopped = plan.next_epoch, False
                    receiver.send(Resumed(epoch, rank))
                    continue
                if is_stopped:
                    continue
                if isinstance(plan, RankPlan) and plan.step == self._fault_at:
                    is_stopped = True
                    if rank == 0:
                        words = "a link is gone"
                        receiver.send(StepResult(epoch, plan.step, 0, error=words, fault="link"))
                    continue
                if isinstance(plan, Pause):
                    receiver.send(in_flight.popleft())
                    continue
                if plan.step == self._fail_at and rank == 0:
                    receiver.send(StepResult(plan.epoch, plan.step, 0, error="out of luck"))
                    continue
                if plan.step == self._stall_at:
                    time.sleep(self._stall_s)
                is_void = plan.step == self._lose_at and rank == self.ranks[-1]
                result = worker.execute(plan, rank, is_void=is_void)
                if rank % self._tp:
                    result = msgspec.structs.replace(result, token_ids=b"", counts=b"")
                result = msgspec.structs.replace(result, expert_tokens=10 * plan.step + rank)
                in_flight.append(result)
                if len(in_flight) == self._steps_in_flight:
                    receiver.send(in_flight.popleft())
        finally:
            receiver.close()

    def _copy(self, job: CopyJob, worker: FakeWorker) -> int:
        """Copy a job's blocks between a worker's cache and the files; return their number."""
        if job.is_upkeep:
            return 0
        starts = range(0, len(job.hashes), HASH_BYTES)
        names = [job.hashes[start : start + HASH_BYTES] for start in starts]
        for name, block in zip(names, unpack_ints(job.block_ids).tolist(), strict=True):
            if job.is_load:
                worker.cache[block] = self._files[name]
            else:
                self._files[name] = worker.cache[block].copy()
        return len(names)

    def close(self) -> None:
        for client in self.later:
            client.close()
        self.loop.stop()
        for thread in (self.thread, *self._workers):
            thread.join(WAIT_S)
            assert not thread.is_alive()


class RawClient:
    """A client that can send any bytes as messages."""

    def __init__(self, endpoint: Endpoint, token: str = TOKEN, name: str = "raw") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        endpoint.connect(self._socket)
        self.send(encoder.encode(Hello(token, name, protocol())))

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self) -> Any:
        """Return the next message that is not a heartbeat."""
        while True:
            assert self._socket.poll(WAIT_S * 1000), "no answer"
            message = from_engine_decoder.decode(self._socket.recv())
            if not isinstance(message, EngineStatus):
                return message

    def close(self) -> None:
        self._context.destroy(linger=0)


def assert_serves(client: EngineClient, name: str = "r") -> None:
    answer = Answer()
    client.submit(name, [1, 2, 3], greedy_params(5), [], answer.take)
    assert answer.ended.wait(WAIT_S)
    assert (answer.finish_reason, len(answer.tokens)) == ("length", 5), answer.error


def make_submit(**changes: Any) -> bytes:
    submit = Submit("bad", 7, pack_ints([1, 2]), RowSampling(num_prompt_tokens=2), 4)
    return encoder.encode(msgspec.structs.replace(submit, **changes))
