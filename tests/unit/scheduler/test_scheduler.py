from __future__ import annotations

import threading
from typing import TypeVar

import pytest

from dist_aclgraph.arrays.ints import pack_ints, unpack_ints
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.errors import (
    InvalidParameterError,
    QueueFullError,
    RequestTooLongError,
    WorkerError,
)
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.look_ups import LIMIT_S, Answer, DiskLookUps, Files, LookUp, LookUps
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.routing import block_hashes
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.steps.step import RowLogprobs, StepPlan, StepResult
from tests.plans import decode_graph, make_plan
from tests.unit.scheduler.requests import EOS, submit

T = TypeVar("T")
DECODE_AT_0 = [0, 4, 1, 1]  # row, num_computed_tokens, num_scheduled_tokens, samples


def make_scheduler(
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    num_blocks: int = 33,
    block_size: int = 16,
    max_model_len: int = 256,
    max_waiting: int = 10,
    **options,
) -> Scheduler:
    plan = make_plan(1, 4, version=5)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_waiting=max_waiting,
    )
    return Scheduler(
        config,
        [BlockPool(num_blocks, block_size)],
        GraphDispatcher(plan),
        max_model_len=max_model_len,
        **options,
    )


def make_request(name: str, num_tokens: int = 4, first: int = 0, **params) -> Request:
    return submit(name, list(range(first, first + num_tokens)), SamplingParams(**params))


def records(plan: StepPlan | None) -> list[list[int]]:
    assert plan is not None
    return unpack_ints(plan.batches[0].scheduled, 4).tolist()


def run(scheduler: Scheduler, *token_ids: int, **fields) -> list[RequestDelta]:
    """End the step in flight: give the scheduler its tokens."""
    result = StepResult(scheduler.epoch, scheduler.step, 0, pack_ints(list(token_ids)), **fields)
    return list(scheduler.update([result]))


def test_a_prompt_runs_eagerly_and_its_decode_replays_a_graph() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add(make_request(name))

    prompt = scheduler.schedule()
    run(scheduler, 10, 11)
    decode = scheduler.schedule()

    assert prompt is not None and decode is not None
    assert prompt.graph is None
    assert decode.graph == decode_graph(4)
    assert (decode.plan_version, decode.step) == (5, 2)
    assert records(decode) == [DECODE_AT_0, [1, 4, 1, 1]]
    assert decode.batches[0].started == ()
    assert unpack_ints(decode.batches[0].appended, 2).tolist() == [[0, 10], [1, 11]]


def test_a_steady_batch_sends_a_block_only_where_a_row_needs_one() -> None:
    scheduler = make_scheduler(block_size=16)
    for name, num_tokens in (("a", 14), ("b", 4)):
        scheduler.add(make_request(name, num_tokens, first=ord(name), max_tokens=30))
    plans = []

    for _ in range(4):
        plans.append(scheduler.schedule())
        run(scheduler, 10, 11)

    blocks = [unpack_ints(plan.batches[0].blocks, 3).tolist() for plan in plans if plan]
    assert blocks == [[], [], [], [[0, 1, 3]]]
    assert records(plans[3]) == [[0, 16, 1, 1], [1, 6, 1, 1]]


def test_a_long_prompt_runs_in_chunks_beside_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(make_request("a"))
    scheduler.schedule()
    run(scheduler, 10)
    scheduler.add(make_request("long", 40))

    chunks = []
    for tokens in ((11,), (12,), (13, 20)):
        chunks.append(records(scheduler.schedule()))
        run(scheduler, *tokens)

    assert [chunk[1] for chunk in chunks] == [[1, 0, 15, 0], [1, 15, 15, 0], [1, 30, 10, 1]]
    assert all(chunk[0][2:] == [1, 1] for chunk in chunks)
    assert scheduler.dispatcher.misses == {"mixed": 3, "prefill": 1}


def test_waiting_requests_are_admitted_in_order_of_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, max_tokens=1))

    scheduler.schedule()
    admitted = [[request.request_id for request in scheduler.admitted]]
    outputs = run(scheduler, 1, 2)
    plan = scheduler.schedule()
    admitted.append([request.request_id for request in scheduler.admitted])

    assert admitted == [["a", "b"], ["c"]]
    assert [output.request_id for output in outputs] == ["a", "b"]
    assert [output.finish_reason for output in outputs] == ["length", "length"]
    assert len(records(plan)) == 1 and scheduler.running[0].request_id == "c"


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        ({"max_tokens": 3}, [1, 2, 3], "length"),
        ({}, [1, EOS], "stop"),
        ({"stop_token_ids": [5]}, [1, 5], "stop"),
        ({"ignore_eos": True, "max_tokens": 2}, [EOS, EOS], "length"),
        ({"min_tokens": 2}, [EOS, EOS, EOS], "stop"),
        ({"max_tokens": None}, [1] * 12, "length"),
    ],
)
def test_a_request_ends_at_the_first_limit_it_meets(params, tokens, reason) -> None:
    scheduler = make_scheduler(max_model_len=16)
    scheduler.add(make_request("a", 4, **params))

    outputs = []
    while scheduler.schedule() is not None:
        outputs += run(scheduler, tokens[len(outputs)])

    assert [token for output in outputs for token in output.tokens] == tokens
    assert [output.finish_reason for output in outputs][-1] == reason
    assert scheduler.ranks[0].pool.num_used == 0


def test_the_workers_are_told_which_ends_to_suppress() -> None:
    scheduler = make_scheduler()
    scheduler.add(
        make_request("a", min_tokens=2, stop_token_ids=[5], temperature=0.0, logprobs=2, seed=-1)
    )

    plan = scheduler.schedule()

    assert plan is not None
    sampling = plan.batches[0].started[0].sampling
    assert (sampling.suppressed, sampling.min_tokens) == ((5, EOS), 2)
    assert (sampling.temperature, sampling.logprobs, sampling.seed) == (0.0, 2, -1)
    assert sampling.num_prompt_tokens == 4


def test_an_equal_beginning_is_taken_from_the_cache_but_never_the_whole_prompt() -> None:
    scheduler = make_scheduler(block_size=16)
    for name in ("first", "again"):
        scheduler.add(make_request(name, 32, max_tokens=1))
        plan = scheduler.schedule()
        (output,) = run(scheduler, 1)

    assert records(plan) == [[0, 16, 16, 1]]
    assert output.num_cached_tokens == 16
    assert scheduler.stats()["cached_tokens"] == 16


def test_equal_beginnings_are_shared_only_by_requests_with_the_same_salt() -> None:
    scheduler = make_scheduler(block_size=16)
    found = []
    for name, salt in (("a", "x"), ("b", "y"), ("c", ""), ("d", "x"), ("e", "")):
        scheduler.add(submit(name, list(range(32)), SamplingParams(max_tokens=1), cache_salt=salt))
        scheduler.schedule()
        (output,) = run(scheduler, 1)
        found.append(output.num_cached_tokens)

    assert found == [0, 0, 0, 16, 16]


def test_the_latest_arrival_is_preempted_and_resumes_with_its_output() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=16)
    for name, first in (("early", 0), ("late", 50)):
        scheduler.add(make_request(name, 16, first, max_tokens=None))
    scheduler.schedule()
    run(scheduler, 1, 2)  # both requests need a second block, but only one is free

    plan = scheduler.schedule()

    assert [request.request_id for request in scheduler.running] == ["early"]
    assert records(plan) == [[0, 16, 1, 1]]
    assert scheduler.stats()["preemptions"] == 1
    scheduler.abort("early")
    run(scheduler, 3)
    resumed = scheduler.schedule()
    assert resumed is not None
    (start,) = resumed.batches[0].started
    assert unpack_ints(start.token_ids).tolist() == [*range(50, 66), 2]
    assert records(resumed) == [[start.row, 16, 1, 1]], "its full block came from the cache"


def test_tokens_for_an_aborted_request_are_dropped() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add(make_request(name))
    scheduler.schedule()

    last = scheduler.abort("a")
    used_in_flight = scheduler.ranks[0].pool.num_used
    outputs = run(scheduler, 1, 2)

    assert last == RequestDelta("a", finish_reason="abort")
    assert used_in_flight == 1, "whoever gets its block writes to it in a later step"
    assert [(output.request_id, output.tokens) for output in outputs] == [("b", [2])]
    assert scheduler.ranks[0].pool.num_used == 1
    assert scheduler.abort("a") is None


def test_a_waiting_request_can_be_aborted() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))

    scheduler.abort("a")

    assert scheduler.schedule() is None
    assert not scheduler.has_work


def test_all_requests_can_be_ended_at_once() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name in "ab":
        scheduler.add(make_request(name))
    scheduler.schedule()

    outputs = scheduler.abort_all("error")

    assert {(o.request_id, o.finish_reason) for o in outputs} == {("a", "error"), ("b", "error")}
    assert run(scheduler, 1) == []
    assert scheduler.ranks[0].pool.num_used == 0


def test_log_probabilities_follow_their_token() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add(make_request(name))
    scheduler.schedule()
    entry = RowLogprobs(pack_ints([2]), (-0.5,), 1)

    outputs = run(scheduler, 1, 2, logprobs=(None, entry))

    assert [output.logprobs for output in outputs] == [(None,), (entry,)]


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "param"),
    [(256, 1, "prompt"), (300, None, "prompt"), (40, 100, "max_tokens"), (64, None, "max_tokens")],
)
def test_a_request_that_can_never_fit_is_refused(num_tokens, max_tokens, param) -> None:
    # requests can use three blocks, which hold 48 tokens
    scheduler = make_scheduler(num_blocks=4, block_size=16)

    with pytest.raises(RequestTooLongError) as caught:
        scheduler.add(make_request("a", num_tokens, max_tokens=max_tokens))

    assert caught.value.param == param
    assert scheduler.num_requests == 0


def test_without_max_tokens_a_request_makes_do_with_a_small_cache() -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=16)
    scheduler.add(make_request("a", 4, max_tokens=None))

    count = 0
    while scheduler.schedule() is not None:
        count += len(run(scheduler, 1))

    assert count == 13  # 4 + 12 tokens fill the block; the 13th needs no KV


def test_a_full_queue_refuses() -> None:
    scheduler = make_scheduler(max_waiting=1)
    rows = scheduler.config.max_num_seqs
    for index in range(rows + 1):  # as many requests as can run, and one that waits
        scheduler.add(make_request(str(index)))

    with pytest.raises(QueueFullError, match="max_waiting"):
        scheduler.add(make_request("one too many"))


def test_a_full_queue_takes_a_request_that_another_group_has_begun() -> None:
    scheduler = make_scheduler(max_waiting=1)
    for index in range(scheduler.config.max_num_seqs + 1):
        scheduler.add(make_request(str(index)))
    begun = submit("begun", [1, 2, 3], SamplingParams(max_tokens=4), output=[4])
    scheduler.add(begun)
    assert begun in scheduler.waiting.queue


@pytest.mark.parametrize(("output", "num_cached"), [([], 16), ([3], 0)])
def test_cached_tokens_are_counted_where_a_request_begins(
    output: list[int], num_cached: int
) -> None:
    """A request that continues may find its own blocks in the cache. The tokens of these blocks do
    not count as cached tokens.
    """
    scheduler, params = make_scheduler(), SamplingParams(max_tokens=2)
    scheduler.add(submit("first", range(17), params))
    scheduler.schedule()
    run(scheduler, 5)
    request = submit("second", range(17), params, output=output)
    scheduler.add(request)
    scheduler.schedule()
    assert scheduler.num_cached_tokens == 16 and request.num_cached_tokens == num_cached


def test_a_request_that_shares_no_blocks_reads_none_from_files() -> None:
    """A preempted request has the hashes of its blocks, because other requests may use these
    blocks. If the request itself may not use cached blocks, the scheduler does not look up files
    for it.
    """
    scheduler = make_scheduler(look_ups=LookUps(Files(lambda block_hash: True)))
    request = make_request("a", 33, prompt_logprobs=0)
    request.hashes = block_hashes(request.tokens.tobytes(), "", 16)
    scheduler.add(request)
    assert scheduler.schedule() is not None and not scheduler.copies.is_running


def test_steps_go_on_while_a_disk_does_not_answer() -> None:
    answers, now_s = threading.Event(), 0.0

    def hang(block_hash: bytes) -> bool:
        return answers.wait(60.0)

    look_ups = DiskLookUps(Files(lambda _: False), Files(hang), clock=lambda: now_s)
    scheduler = make_scheduler(look_ups=look_ups)
    scheduler.add(make_request("long", 33, max_tokens=2))
    scheduler.add(make_request("short", 5, max_tokens=8))
    plan = scheduler.schedule()
    assert plan is not None and plan.largest.num_tokens == 5
    run(scheduler, 11)
    assert scheduler.copies.is_looking and scheduler.schedule() is not None
    now_s = LIMIT_S
    run(scheduler, 11)
    plan = scheduler.schedule()
    assert plan is not None and plan.largest.num_tokens == 1 + 33, "nothing was found"
    answers.set()


@pytest.mark.parametrize("num_tokens", [5, 16, 33])
def test_a_request_without_blocks_to_look_up_waits_for_no_disk(num_tokens: int) -> None:
    """Either the prompt has no full block that files could contain, or all its blocks are in the
    cache.
    """

    class Silent(LookUps):
        def ask(self, look_up: LookUp[T]) -> Answer[T]:
            return lambda: None

    scheduler = make_scheduler(look_ups=Silent(Files(lambda _: False)))
    [rank] = scheduler.ranks
    request = make_request("a", num_tokens)
    for block_hash in block_hashes(request.tokens.tobytes(), "", 16):
        [block_id] = rank.pool.allocate(1)
        rank.pool.store(block_id, block_hash)
    scheduler.add(request)
    assert scheduler.schedule() is not None and request.row >= 0


def test_ids_are_unique_and_prompts_not_empty() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))

    with pytest.raises(InvalidParameterError, match="already in use"):
        scheduler.add(make_request("a"))
    with pytest.raises(InvalidParameterError, match="empty"):
        make_request("b", 0)


def test_a_failed_or_short_result_ends_the_epoch() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    scheduler.schedule()

    with pytest.raises(WorkerError, match="brought 0 tokens, 1 requests were sampled"):
        run(scheduler)
    with pytest.raises(WorkerError, match="107027"):
        run(scheduler, error="107027")
