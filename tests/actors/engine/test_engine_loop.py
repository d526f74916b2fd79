"""The engine's loop talks over real sockets to a worker that has no model."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.engine.engine_loop import MEAN_FROM
from dist_aclgraph.actors.wire.messages import Abort, Deltas, encoder
from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.errors import DeviceFaultError, EngineDeadError
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.copies import BlockCopyJobs
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.steps.step import RankPlan, StepPlan
from dist_aclgraph.topology import GroupRank
from tests.actors.leftovers import wait_until
from tests.actors.loop_group import (
    BLOCK,
    NODE,
    TOKEN,
    VOCAB,
    WAIT_S,
    Group,
    RawClient,
    assert_serves,
    make_submit,
)
from tests.deployments import Answer, greedy_params
from tests.unit.scheduler.fake_worker import next_token


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path)
    yield group
    group.close()


@pytest.fixture
def client(group: Group) -> Iterator[EngineClient]:
    client = EngineClient([group.clients_at], TOKEN, node_id=NODE, link_s=WAIT_S)
    yield client
    client.close()


@pytest.fixture
def raw(group: Group) -> Iterator[RawClient]:
    raw = RawClient(group.address)
    yield raw
    raw.close()


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
def test_invalid_frames_do_not_end_the_loop(
    raw: RawClient, client: EngineClient, frames: tuple[bytes, ...]
) -> None:
    raw.send(*frames)

    assert_serves(client)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": b"12345"},
        {"prompt": b""},
        {"prompt": pack_ints([1, VOCAB])},
        {"prompt": pack_ints([-1, 1])},
        {"max_tokens": 0},
        {"max_tokens": -3},
    ],
)
def test_a_request_that_makes_no_sense_ends_with_an_error_of_its_own(
    raw: RawClient, client: EngineClient, changes: dict[str, Any]
) -> None:
    raw.send(make_submit(**changes))

    message = raw.receive()

    assert isinstance(message, Deltas)
    [delta] = message.step.each({7: "bad"})
    assert delta.finish_reason == "error"
    assert_serves(client)


def test_a_client_with_a_wrong_token_gets_no_service(group: Group, client: EngineClient) -> None:
    stranger = RawClient(group.address, "guess")
    stranger.send(make_submit())

    assert "token" in stranger.receive().reason
    assert_serves(client)
    assert client.query("metrics")["0"]["prompt_tokens"] == 3
    stranger.close()


def test_a_request_id_in_use_is_refused_and_the_first_goes_on(
    raw: RawClient, client: EngineClient
) -> None:
    first = Answer()
    client.submit("bad", [1, 2, 3], greedy_params(100), [], first.take)
    assert first.began.wait(WAIT_S)

    raw.send(make_submit())

    [delta] = raw.receive().step.each({7: "bad"})
    assert delta.error_kind == "InvalidParameterError"
    assert first.ended.wait(WAIT_S)
    assert len(first.tokens) == 100


class FakeFetches:
    """Records, for each request, the source of its blocks, and whether the engine still wants the
    blocks when the fetch begins.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.is_wanted: Callable[[], bool] = lambda: False

    def ways_from(self, source: str, is_wanted: Callable[[], bool]) -> tuple[None, None]:
        self.asked.append((source, is_wanted()))
        self.is_wanted = is_wanted
        return None, None


def test_a_fetch_of_blocks_is_wanted_until_its_request_ends(tmp_path: Path) -> None:
    fetches = FakeFetches()
    group = Group(tmp_path, fetches=fetches)
    group.later.append(raw := RawClient(group.address))
    try:
        raw.send(make_submit(source="7", max_tokens=100, request_id="other"))
        raw.send(make_submit(number=8, max_tokens=100))
        assert raw.receive() and raw.receive()
        assert fetches.asked == [("7", True)]
        raw.send(encoder.encode(Abort("other")))
        wait_until(lambda: not fetches.is_wanted(), "the fetch goes on")
    finally:
        group.close()


def test_an_aborted_request_frees_its_blocks(group: Group, client: EngineClient) -> None:
    answer = Answer()
    client.submit("r", [1, 2, 3], greedy_params(120), [], answer.take)
    assert answer.began.wait(WAIT_S)

    client.abort("r")

    wait_until(lambda: group.loop.metrics()["kv_cache_usage"] == 0.0, "blocks are held")
    assert_serves(client, "next")


def test_a_failing_step_ends_all_requests_and_refuses_later_ones(tmp_path: Path) -> None:
    group = Group(tmp_path, fail_at=10)
    client = EngineClient([group.clients_at], TOKEN, node_id=NODE, link_s=WAIT_S)
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
    client = EngineClient([group.clients_at], TOKEN, node_id=NODE, link_s=WAIT_S)
    answer = Answer()
    client.submit("r", [1], greedy_params(120), [], answer.take)
    assert answer.began.wait(WAIT_S)

    group.close()
    client.close()

    assert answer.ended.wait(WAIT_S)


def serve_twelve(client: EngineClient) -> None:
    """Run 12 requests at the same time, each with 3 prompt tokens and 20 output tokens, and check
    their outputs.
    """
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


def test_the_first_delta_of_a_request_tells_the_time_of_its_prefill(
    client: EngineClient,
) -> None:
    deltas: list[RequestDelta] = []
    answer = Answer()

    def take(delta: RequestDelta) -> None:
        deltas.append(delta)
        answer.take(delta)

    before_s = time.monotonic()
    client.submit("r", [1, 2, 3], greedy_params(5), [], take)

    assert answer.ended.wait(WAIT_S)
    first, *others = [delta.prefill_s for delta in deltas]
    assert 0 < first < time.monotonic() - before_s
    assert others == [0, 0, 0, 0]


def test_data_parallel_ranks_serve_their_requests_in_the_same_steps(tmp_path: Path) -> None:
    group = Group(tmp_path, dp=2, tp=2, num_drafts=2, lose_at=6)
    client = EngineClient([group.clients_at], TOKEN, node_id=NODE, link_s=WAIT_S)

    serve_twelve(client)

    [metrics] = client.query("metrics").values()
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


def test_a_group_that_comes_back_goes_on_with_every_token(tmp_path: Path) -> None:
    group = Group(tmp_path, dp=2, tp=2, num_drafts=2, fault_at=8)
    client = EngineClient([group.clients_at], TOKEN, node_id=NODE, link_s=WAIT_S)

    serve_twelve(client)

    [metrics] = client.query("metrics").values()
    assert metrics["resumptions"] == {"link": 1}
    assert metrics["prompt_tokens"] == metrics["prefix_cache_queries"] == 12 * 3
    assert metrics["generation_tokens"] == 12 * 20
    assert client.num_resumed == 0
    client.close()
    group.close()


class WaitForSecond:
    """Delays the scheduler's decision until a second request has arrived, and records the steps."""

    def __init__(self) -> None:
        self.num_requests: Callable[[], int] = lambda: 0
        self.is_waiting = threading.Event()
        self.ended: list[StepPlan] = []
        self._has_second = False

    def delay_s(self, running: StepPlan) -> float:
        self._has_second = self._has_second or self.num_requests() > 1
        self.is_waiting.set()
        return 0.0 if self._has_second else WAIT_S

    def note(self, ended: StepPlan, delayed_s: float, waited_s: float) -> None:
        self.ended.append(ended)


def test_a_request_that_arrives_while_a_step_runs_begins_in_the_next_step(tmp_path: Path) -> None:
    late = WaitForSecond()
    group = Group(tmp_path, late_decisions=late)
    late.num_requests = lambda: group.scheduler.num_requests
    client = EngineClient([group.clients_at], TOKEN, node_id=NODE, link_s=WAIT_S)
    first, second = Answer(), Answer()
    client.submit("r0", [1, 2, 3], greedy_params(20), [], first.take)
    assert late.is_waiting.wait(WAIT_S)

    client.submit("r1", [4, 5], greedy_params(5), [], second.take)

    assert first.ended.wait(WAIT_S) and second.ended.wait(WAIT_S)
    assert [len(step.batches[0].started) for step in late.ended[:2]] == [1, 1]
    client.close()
    group.close()


@pytest.mark.parametrize("num_messages", [1, 4])
def test_a_request_whose_blocks_were_read_begins_in_the_next_decision(
    tmp_path: Path, num_messages: int
) -> None:
    """Each step has a message for the job that reads the blocks. When workers answer the last
    message, one further step is already decided.
    """
    files: dict[bytes, Any] = {}
    prompt = list(range(2 * BLOCK + 1))
    for name, others in (("saves", []), ("reads", [[100] * 3])):
        (tmp_path / name).mkdir()
        group = Group(tmp_path / name, files=files, copy_messages=num_messages)
        client = EngineClient([group.clients_at], TOKEN, node_id=NODE, link_s=WAIT_S)
        answers = [Answer() for _ in (*others, prompt)]
        for answer, tokens in zip(answers, (*others, prompt), strict=True):
            client.submit(str(len(tokens)), tokens, greedy_params(90), [], answer.take)
        assert all(answer.ended.wait(WAIT_S) for answer in answers)
        wait_until(lambda: len(files) >= len(prompt) // BLOCK, "blocks are not saved")
        client.close()
        group.close()
    steps = [each for each in group.received if isinstance(each, RankPlan | BlockCopyJobs)]
    (read,) = (i for i, each in enumerate(steps) if reads_blocks(each))
    decided = [each.step for each in steps[:read] if isinstance(each, RankPlan)]
    begun = [e.step for e in steps[read:] if isinstance(e, RankPlan) and e.batch.started]
    assert begun[0] <= max(decided, default=-1) + num_messages + 1


def reads_blocks(message: RankPlan | BlockCopyJobs) -> bool:
    return isinstance(message, BlockCopyJobs) and any(job.is_load for job in message.jobs)


class FailingCopies:
    """Copy jobs during which a device fails. The failure comes while no step runs. At this time,
    the last tokens are not delivered yet.
    """

    is_busy = has_failed = False

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def turn(self, *, is_idle: bool) -> None:
        if is_idle and self._scheduler.step and not self.has_failed:
            self.has_failed = True
            raise DeviceFaultError("a link is gone", 0, "SERVING", "link")

    def take_answers(self) -> None:
        pass

    def reset(self) -> None:
        pass


def test_a_fault_during_copies_loses_no_tokens(group: Group, client: EngineClient) -> None:
    copies: Any = FailingCopies(group.scheduler)
    group.loop._copies = copies
    assert_serves(client)
    assert_serves(client, "later")
    assert copies.has_failed


def test_clients_learn_of_a_group_that_takes_long_to_come_back(tmp_path: Path) -> None:
    goes_on = threading.Event()

    def stop(timeout_s: float, check: Callable[[], None]) -> dict[GroupRank, str]:
        while not goes_on.wait(0.01):
            check()
        return {}

    group = Group(tmp_path, fault_at=8, stop=stop)
    client = EngineClient([group.clients_at], TOKEN, node_id=NODE, link_s=WAIT_S)
    answer = Answer()
    client.submit("r", [1, 2, 3], greedy_params(40), [], answer.take)

    wait_until(lambda: "a link is gone" in client.outage(), "nobody says that the group stands")
    assert not answer.ended.is_set()
    goes_on.set()
    assert answer.ended.wait(WAIT_S)
    assert (answer.finish_reason, len(answer.tokens)) == ("length", 40), answer.error
    wait_until(lambda: not client.outage(), "the group still stands")
    client.close()
    group.close()


def test_a_rank_that_does_not_stop_ends_the_epoch_with_its_name(tmp_path: Path) -> None:
    group = Group(tmp_path, tp=2, fault_at=8, stop=lambda *_: {GroupRank(1): "it hangs"})
    client = EngineClient([group.clients_at], TOKEN, node_id=NODE, link_s=WAIT_S)
    answer = Answer()
    client.submit("r", [1, 2, 3], greedy_params(40), [], answer.take)

    assert answer.ended.wait(WAIT_S)
    words = (
        r"rank 1 in SERVING: it did not come back \(it hangs\) after rank 0 in .*: a link is gone"
    )
    assert re.search(words, answer.error), answer.error
    client.close()
    group.close()


def test_the_mean_of_few_steps_is_not_reported(group: Group, client: EngineClient) -> None:
    answer = Answer()
    client.submit("a", [1, 2], greedy_params(MEAN_FROM // 2), [], answer.take)
    assert answer.ended.wait(WAIT_S)
    assert group.loop.step_seconds() == {}

    answer = Answer()
    client.submit("b", [1, 2], greedy_params(2 * MEAN_FROM), [], answer.take)
    assert answer.ended.wait(WAIT_S)

    [(graph, seconds)] = group.loop.step_seconds().items()
    assert graph.num_tokens == 1
    assert seconds > 0


def test_steps_without_a_graph_are_timed_over_their_tokens(
    group: Group, client: EngineClient
) -> None:
    for count in range(MEAN_FROM):
        assert group.loop.eager_times() == {}
        answer = Answer()
        client.submit(str(count), [1] * (2 + count % 2), greedy_params(1), [], answer.take)
        assert answer.ended.wait(WAIT_S)

    times = group.loop.eager_times()
    assert times["steps"] == MEAN_FROM
    assert times["base_seconds"] + times["token_seconds"] > 0
