"""The engine's loop with a worker that has no model, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from dist_aclgraph.actors.engine_client import EngineClient
from dist_aclgraph.actors.engine_loop import EngineLoop
from dist_aclgraph.actors.graph_changes import GraphChanges
from dist_aclgraph.actors.graph_transaction import GraphTransaction
from dist_aclgraph.actors.messages import Deltas, Hello, Submit, encoder, from_engine_decoder
from dist_aclgraph.actors.step_channel import StepReceiver, StepSender
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.errors import EngineDeadError
from dist_aclgraph.ints import pack_ints
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.step import RowSampling, StepResult
from tests.actors.leftovers import wait_until
from tests.deployments import Answer, greedy_params
from tests.plans import make_plan
from tests.unit.scheduler.fake_worker import FakeWorker, next_token

TOKEN, EPOCH, WAIT_S = "secret", 1, 10.0
NUM_BLOCKS, BLOCK = 32, 16


class Group:
    """One lockstep group of fake workers.

    Args:
        fail_at: the step at which rank 0 reports an error.
        dp, tp: data-parallel ranks, and ranks of each; more than one share experts.
        num_drafts: draft tokens of each request, of which one is right.
        lose_at: the step at which the last rank's tokens find no room on their way.
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
    ) -> None:
        self.ranks = tuple(range(dp * tp))
        channel = StepSender(len(self.ranks), str(directory))
        self._fail_at, self._lose_at, self._tp = fail_at, lose_at, tp
        self._num_drafts = num_drafts
        self._workers = [
            threading.Thread(target=self._work, args=(channel.address, rank), daemon=True)
            for rank in self.ranks
        ]
        for worker in self._workers:
            worker.start()
        channel.wait_for_workers(WAIT_S, lambda: None)
        query_len = num_drafts + 1
        plan = make_plan(query_len, 2 * query_len, 4 * query_len, query_len=query_len)
        self.address = f"ipc://{directory}/clients"
        dispatcher = GraphDispatcher(plan)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
            [BlockPool(NUM_BLOCKS, BLOCK, prefix_cache=True) for _ in range(dp)],
            dispatcher,
            max_model_len=128,
            epoch=EPOCH,
            num_drafts=num_drafts,
            tp=tp,
            choose_exchange=lambda num_tokens: "all_to_all" if dp > 1 else None,
        )
        self.loop = EngineLoop(
            self.scheduler,
            channel,
            address=self.address,
            token=TOKEN,
            step_timeout_s=WAIT_S,
            changes=GraphChanges(dispatcher, GraphTransaction(self, WAIT_S, WAIT_S), {}),
            report={},
        )
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()

    def carry_out(self, *_: Any) -> Any:
        raise AssertionError("no graph changes here")

    def _work(self, address: Any, rank: int) -> None:
        worker = FakeWorker(
            NUM_BLOCKS, BLOCK, num_drafts=self._num_drafts, accept=lambda: min(1, self._num_drafts)
        )
        receiver, dp_rank = StepReceiver(address), rank // self._tp
        try:
            while (plan := receiver.receive(EPOCH)) is not None:
                if plan.step == self._fail_at and rank == 0:
                    receiver.send(StepResult(plan.epoch, plan.step, 0, error="out of luck"))
                    continue
                is_void = plan.step == self._lose_at and rank == self.ranks[-1]
                result = worker.execute(plan, dp_rank, rank, is_void=is_void)
                if rank % self._tp:
                    result = msgspec.structs.replace(result, token_ids=b"", counts=b"")
                receiver.send(msgspec.structs.replace(result, expert_tokens=10 * plan.step + rank))
        finally:
            receiver.close()

    def close(self) -> None:
        self.loop.stop()
        for thread in (self.thread, *self._workers):
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path)
    yield group
    group.close()


@pytest.fixture
def client(group: Group) -> Iterator[EngineClient]:
    client = EngineClient([group.address], TOKEN, heartbeat_s=0.1, dead_after_s=WAIT_S)
    yield client
    client.close()


class RawClient:
    """A client that sends what it likes."""

    def __init__(self, address: str, token: str = TOKEN) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._socket.send(encoder.encode(Hello(token)))

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self) -> Any:
        assert self._socket.poll(WAIT_S * 1000), "no answer"
        return from_engine_decoder.decode(self._socket.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def raw(group: Group) -> Iterator[RawClient]:
    raw = RawClient(group.address)
    yield raw
    raw.close()


def assert_serves(client: EngineClient, name: str = "r") -> None:
    answer = Answer()
    client.submit(name, [1, 2, 3], greedy_params(5), [], answer.take)
    assert answer.ended.wait(WAIT_S)
    assert (answer.finish_reason, len(answer.tokens)) == ("length", 5), answer.error


def make_submit(**changes: Any) -> bytes:
    submit = Submit("bad", pack_ints([1, 2]), RowSampling(num_prompt_tokens=2), 4)
    return encoder.encode(msgspec.structs.replace(submit, **changes))


@pytest.mark.parametrize(
    "frames",
    [
        (b"",),
        (b"garbage",),
        (b"", b"two frames"),
        (encoder.encode({"type": "submit"}),),
        (encoder.encode({"type": "nothing"}),),
    ],
)
def test_what_is_no_message_ends_nothing(
    raw: RawClient, client: EngineClient, frames: tuple[bytes, ...]
) -> None:
    raw.send(*frames)

    assert_serves(client)


@pytest.mark.parametrize(
    "changes",
    [{"prompt": b"12345"}, {"prompt": b""}, {"max_tokens": 0}, {"max_tokens": -3}],
)
def test_a_request_that_makes_no_sense_ends_with_an_error_of_its_own(
    raw: RawClient, client: EngineClient, changes: dict[str, Any]
) -> None:
    raw.send(make_submit(**changes))

    message = raw.receive()

    assert isinstance(message, Deltas)
    assert message.deltas[0].finish_reason == "error"
    assert_serves(client)


def test_a_client_with_a_wrong_token_gets_no_service(group: Group, client: EngineClient) -> None:
    stranger = RawClient(group.address, "guess")
    stranger.send(make_submit())

    assert "token" in stranger.receive().reason
    assert_serves(client)
    assert client.query("metrics")[0]["prompt_tokens"] == 3
    stranger.close()


def test_a_request_id_in_use_is_refused_and_the_first_goes_on(
    raw: RawClient, client: EngineClient
) -> None:
    first = Answer()
    client.submit("bad", [1, 2, 3], greedy_params(100), [], first.take)
    assert first.began.wait(WAIT_S)

    raw.send(make_submit())

    [delta] = raw.receive().deltas
    assert delta.error_kind == "InvalidParameterError"
    assert first.ended.wait(WAIT_S)
    assert len(first.tokens) == 100


def test_an_aborted_request_frees_its_blocks(group: Group, client: EngineClient) -> None:
    answer = Answer()
    client.submit("r", [1, 2, 3], greedy_params(120), [], answer.take)
    assert answer.began.wait(WAIT_S)

    client.abort("r")

    wait_until(lambda: group.loop.metrics()["kv_cache_usage"] == 0.0, "blocks are held")
    assert_serves(client, "next")


def test_a_failing_step_ends_all_requests_and_refuses_later_ones(tmp_path: Path) -> None:
    group = Group(tmp_path, fail_at=10)
    client = EngineClient([group.address], TOKEN, heartbeat_s=0.1, dead_after_s=WAIT_S)
    answers = [Answer() for _ in range(3)]
    for i, answer in enumerate(answers):
        client.submit(f"r{i}", [1 + i], greedy_params(100), [], answer.take)

    for answer in answers:
        assert answer.ended.wait(WAIT_S)
        assert "rank 0 in SERVING: out of luck" in answer.error
    wait_until(lambda: _is_refused(client), "a dead engine takes requests")
    client.close()
    group.close()


def _is_refused(client: EngineClient) -> bool:
    answer = Answer()
    try:
        client.submit("late", [1], greedy_params(1), [], answer.take)
    except EngineDeadError as e:
        return "out of luck" in str(e)
    assert answer.ended.wait(WAIT_S)
    assert answer.error_kind == "EngineDeadError"
    return False


def test_stopping_ends_the_loop_while_requests_run(tmp_path: Path) -> None:
    group = Group(tmp_path)
    client = EngineClient([group.address], TOKEN, heartbeat_s=0.1, dead_after_s=WAIT_S)
    answer = Answer()
    client.submit("r", [1], greedy_params(120), [], answer.take)
    assert answer.began.wait(WAIT_S)

    group.close()
    client.close()

    assert answer.ended.wait(WAIT_S)


def test_data_parallel_ranks_serve_their_requests_in_the_same_steps(tmp_path: Path) -> None:
    group = Group(tmp_path, dp=2, tp=2, num_drafts=2, lose_at=6)
    client = EngineClient([group.address], TOKEN, heartbeat_s=0.1, dead_after_s=WAIT_S)
    answers = [Answer() for _ in range(12)]
    prompts = [[i, i + 1, i + 2] for i in range(len(answers))]
    for i, answer in enumerate(answers):
        client.submit(f"r{i}", prompts[i], greedy_params(20), [], answer.take)

    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ended.wait(WAIT_S)
        tokens = list(prompt)
        for _ in range(20):
            tokens.append(next_token(tokens, 50))
        assert (answer.tokens, answer.finish_reason) == (tokens[3:], "length"), answer.error

    [metrics] = client.query("metrics")
    assert metrics["step_reruns"] == 1
    assert metrics["num_requests_running_by_dp_rank"] == {"0": 0, "1": 0}
    assert metrics["spec_decode_num_accepted_tokens_per_pos"].keys() == {"0", "1"}
    assert metrics["spec_decode_num_accepted_tokens_per_pos"]["1"] == 0
    assert metrics["spec_decode_num_draft_tokens"] == 2 * metrics["spec_decode_num_drafts"]
    assert metrics["spec_decode_num_accepted_tokens"] == metrics["spec_decode_num_drafts"] > 0
    last = metrics["expert_tokens"]["0"]
    assert metrics["expert_tokens"] == {str(rank): last + rank for rank in range(4)}
    assert metrics["generation_tokens"] == 12 * 20
    client.close()
    group.close()
