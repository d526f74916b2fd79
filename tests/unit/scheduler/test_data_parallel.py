"""Single decisions of the scheduler for several data-parallel ranks. In some tests, steps lose
tokens or have drafts.
"""

from __future__ import annotations

from typing import Any

import pytest

from dist_aclgraph.arrays.ints import pack_ints, unpack_ints
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.errors import InvalidParameterError, WorkerError
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.look_ups import Answer, Files, LookUp, LookUps, T
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.steps.step import RowLogprobs, StepPlan, StepResult
from tests.plans import decode_graph, make_plan
from tests.unit.scheduler.requests import EOS, submit

BLOCK = 16


def make_scheduler(dp: int = 2, num_blocks: int = 33, **options) -> Scheduler:
    query_len = options.get("num_drafts", 0) + 1
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "long_prompt_tokens": 64}
    limits |= {key: options.pop(key) for key in list(options) if key in limits}
    return Scheduler(
        SchedulerConfig(**limits),
        [BlockPool(num_blocks, BLOCK) for _ in range(dp)],
        GraphDispatcher(make_plan(query_len, 4 * query_len, query_len=query_len)),
        max_model_len=options.pop("max_model_len", 256),
        **options,
    )


def make_request(name: str, num_tokens: int = 4, first: int = 0, **params) -> Request:
    return submit(name, list(range(first, first + num_tokens)), SamplingParams(**params))


def start(scheduler: Scheduler, *requests: Request) -> StepPlan:
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def finish(scheduler: Scheduler, *tokens: list[int], tp: int = 1, **fields) -> list[RequestDelta]:
    """End the step in flight: give the scheduler the tokens of each data-parallel rank."""
    results = [
        StepResult(scheduler.epoch, scheduler.step, dp_rank * tp, pack_ints(found), **fields)
        for dp_rank, found in enumerate(tokens)
    ]
    return list(scheduler.update(results))


def lengths(plan: StepPlan | None) -> list[list[int]]:
    """Return, for each data-parallel rank, the number of tokens that each of its requests runs."""
    assert plan is not None
    return [unpack_ints(batch.scheduled, 4)[:, 2].tolist() for batch in plan.batches]


def names(scheduler: Scheduler) -> list[list[str]]:
    return [[request.request_id for request in rank.running] for rank in scheduler.ranks]


def test_requests_go_to_the_rank_with_the_fewest() -> None:
    scheduler = make_scheduler(dp=3)

    start(scheduler, *(make_request(name, first=10 * i) for i, name in enumerate("abcde")))

    assert names(scheduler) == [["a", "d"], ["b", "e"], ["c"]]


def test_of_ranks_with_as_many_requests_the_one_with_most_free_blocks_gets_the_next() -> None:
    scheduler = make_scheduler()

    start(scheduler, make_request("long", 40), make_request("short", 4), make_request("next", 4))

    assert names(scheduler) == [["long"], ["short", "next"]]


def test_a_request_goes_where_its_beginning_is_cached() -> None:
    scheduler = make_scheduler()
    start(scheduler, make_request("a", 40), make_request("b", 40, first=100))
    finish(scheduler, [1], [1])
    scheduler.schedule()
    finish(scheduler, [1], [1])

    plan = start(scheduler, make_request("like b", 40, first=100), make_request("other", 4, 200))

    assert names(scheduler) == [["a", "other"], ["b", "like b"]]
    assert lengths(plan) == [[1, 4], [1, 8]]


def test_ranks_of_one_node_have_the_same_files() -> None:
    """Ranks of one node have the same files. So the scheduler looks up a request's files once, and
    the request can then start on any rank.
    """
    no_files, asked, has_answer = Files(lambda _: False), list[Any](), False

    class SlowLookUps(LookUps):
        def ask(self, look_up: LookUp[T]) -> Answer[T]:
            asked.append(look_up)
            return lambda: look_up(no_files) if has_answer else None

    scheduler = make_scheduler(look_ups=SlowLookUps(no_files))
    start(scheduler, make_request("long", 40), make_request("short", 4, 100))
    assert names(scheduler) == [["short"], []] and len(asked) == 1
    has_answer = True
    finish(scheduler, [1], [])
    scheduler.schedule()

    assert names(scheduler) == [["short"], ["long"]] and len(asked) == 1


def test_blocks_that_several_ranks_fill_by_decoding_are_cached() -> None:
    scheduler = make_scheduler()
    start(
        scheduler,
        make_request("a", 15, ignore_eos=True),
        make_request("b", 15, 100, ignore_eos=True),
    )
    for token in (7, 8, 9):
        finish(scheduler, [token], [token])
        scheduler.schedule()

    longer = submit("like b", [*range(100, 115), 7, 8], SamplingParams(max_tokens=1))
    start(scheduler, longer)

    assert [len(rank.prefixes.match(longer)) for rank in scheduler.ranks] == [0, 1]


def test_an_idle_rank_runs_along_with_an_empty_batch_and_the_others_graph() -> None:
    scheduler = make_scheduler(dp=3)
    start(scheduler, make_request("a"), make_request("b"))
    finish(scheduler, [1], [2], [])

    plan = scheduler.schedule()

    assert plan is not None
    assert lengths(plan) == [[1], [1], []]
    assert plan.graph == decode_graph(1)


def test_one_rank_in_its_prompt_makes_the_step_eager_for_all() -> None:
    scheduler = make_scheduler()
    start(scheduler, make_request("a"))
    finish(scheduler, [1], [])

    plan = start(scheduler, make_request("b", 5))

    assert lengths(plan) == [[1], [5]]
    assert plan.graph is None
    assert scheduler.dispatcher.misses == {"mixed": 1, "prefill": 1}


def test_a_preempted_request_goes_on_at_another_rank() -> None:
    scheduler = make_scheduler(num_blocks=4)
    early, late, other = (
        make_request(name, num_tokens, first, max_tokens=None)
        for name, num_tokens, first in (("early", 16, 0), ("other", 30, 50), ("late", 16, 90))
    )
    start(scheduler, early, late, other)
    finish(scheduler, [1, 2], [3])  # "early" and "late" now need more blocks than rank 0 has
    assert names(scheduler) == [["early", "late"], ["other"]]
    scheduler.abort("other")

    plan = scheduler.schedule()

    assert names(scheduler) == [["early"], ["late"]]
    assert lengths(plan) == [[1], [17]]
    assert plan is not None
    assert unpack_ints(plan.batches[1].started[0].token_ids).tolist() == [*range(90, 106), 2]


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pcp": 2}])
def test_the_first_rank_of_each_data_parallel_rank_brings_its_tokens(
    sizes: dict[str, int],
) -> None:
    scheduler = make_scheduler(**sizes)
    start(scheduler, make_request("a"), make_request("b"))
    acknowledgements = [StepResult(0, 1, rank) for rank in (1, 3)]
    owners = [StepResult(0, 1, rank, pack_ints([10 + rank])) for rank in (2, 0)]

    outputs = scheduler.update([*acknowledgements, *owners])

    assert [(o.request_id, o.tokens) for o in outputs] == [("a", [10]), ("b", [12])]


def test_log_probabilities_of_a_prompt_that_ranks_split_are_refused() -> None:
    request = submit("a", [1, 2, 3], SamplingParams(prompt_logprobs=1))

    with pytest.raises(InvalidParameterError, match=r"parallel\.pcp above 1"):
        make_scheduler(pcp=2).add(request)

    make_scheduler(tp=2).add(request)


def test_no_result_is_applied_if_a_result_of_another_rank_is_missing() -> None:
    scheduler = make_scheduler()
    start(scheduler, make_request("a"), make_request("b"))

    with pytest.raises(WorkerError, match="rank 1 in SERVING: step 1 brought no result"):
        finish(scheduler, [1])
    with pytest.raises(WorkerError, match="brought 0 tokens, 1 requests"):
        finish(scheduler, [1], [])

    assert [len(request.tokens) for request in scheduler.running] == [4, 4]


def test_the_exchange_is_chosen_by_the_padded_tokens_of_a_rank() -> None:
    seen = []
    scheduler = make_scheduler(choose_exchange=lambda n: seen.append(n) or "mc2")
    plans = [start(scheduler, make_request("a", 7), make_request("b", 9), make_request("c", 2))]
    finish(scheduler, [1, 2], [3])
    plans.append(scheduler.schedule())

    assert seen == [9, 4]
    assert [plan.exchange for plan in plans if plan] == ["mc2", "mc2"]


def test_a_step_that_lost_tokens_is_run_again_and_only_then_counts() -> None:
    scheduler = make_scheduler(choose_exchange=lambda n: "all_to_all")
    first = start(scheduler, make_request("a"), make_request("b", 7))
    lost = StepResult(0, 1, 1, pack_ints([2]), num_unplaced=3)

    assert list(scheduler.update([StepResult(0, 1, 0, pack_ints([1])), lost])) == []
    scheduler.abort("b")
    again = scheduler.schedule()
    outputs = finish(scheduler, [5], [])

    assert again is not None
    assert (again.epoch, again.step, again.graph, again.exchange) == (0, 2, None, "all_gather")
    assert [b.scheduled for b in again.batches] == [first.batches[0].scheduled, b""]
    assert all(not (b.started or b.appended or b.blocks) for b in again.batches)
    assert [(o.request_id, o.tokens) for o in outputs] == [("a", [5])]
    assert scheduler.stats()["reruns"] == 1
    assert [rank.pool.num_used for rank in scheduler.ranks] == [1, 0]


def test_a_finished_request_writes_to_no_stored_block_when_a_step_runs_again() -> None:
    scheduler = make_scheduler(
        dp=1, num_drafts=3, choose_exchange=lambda n: "mc2" if n < 12 else "all_to_all"
    )
    start(scheduler, make_request("a", BLOCK - 2))
    finish(scheduler, [1])
    scheduler.schedule()
    behind = start(scheduler, make_request("b", 40, first=50))
    scheduler.update([StepResult(0, 2, 0, pack_ints([2, 3, EOS]), counts=pack_ints([3]))])
    finish(scheduler, [4, 5], counts=pack_ints([1, 1]), num_unplaced=1)

    again = scheduler.schedule()
    outputs = finish(scheduler, [6], counts=pack_ints([1]))

    assert lengths(behind) == [[4, 40]]
    assert lengths(again) == [[40]]
    assert [(o.request_id, o.tokens) for o in outputs] == [("b", [6])]


def test_a_step_that_lost_tokens_does_not_run_again_if_its_request_was_aborted() -> None:
    scheduler = make_scheduler(choose_exchange=lambda n: "all_to_all")
    start(scheduler, make_request("a"))
    finish(scheduler, [1], [], num_unplaced=3)
    scheduler.abort("a")

    assert scheduler.schedule() is None
    assert not scheduler.has_work
    assert lengths(start(scheduler, make_request("b"))) == [[4], []]


def test_an_exchange_for_all_tokens_that_loses_some_ends_the_epoch() -> None:
    scheduler = make_scheduler(choose_exchange=lambda n: "all_gather")
    start(scheduler, make_request("a"))

    with pytest.raises(WorkerError, match="3 tokens found no room"):
        finish(scheduler, [1], [], num_unplaced=3)


def test_the_experts_loads_are_kept_by_rank() -> None:
    scheduler = make_scheduler(choose_exchange=lambda n: "mc2")
    start(scheduler, make_request("a"))

    scheduler.update(
        [StepResult(0, 1, 0, pack_ints([1]), expert_tokens=8), StepResult(0, 1, 1, expert_tokens=5)]
    )

    assert scheduler.expert_tokens == {0: 8, 1: 5}


# ---- drafts


def start_drafting(**options) -> Scheduler:
    """Return a scheduler with one rank, which gives each request two drafts in each step. Its only
    request has sampled the token 50.
    """
    params = {"num_tokens": options.pop("num_tokens", 4), **options.pop("params", {})}
    scheduler = make_scheduler(dp=1, num_drafts=2, **options)
    start(scheduler, make_request("a", **params))
    finish(scheduler, [50])
    return scheduler


def verify(scheduler: Scheduler, *tokens: int, **fields) -> RequestDelta:
    """Run a step in which the only request gets ``tokens``."""
    assert lengths(scheduler.schedule()) == [[3]]
    (output,) = finish(scheduler, list(tokens), counts=pack_ints([len(tokens)]), **fields)
    return output


def test_a_request_that_has_sampled_runs_its_last_token_and_its_drafts() -> None:
    scheduler = start_drafting()

    plan = scheduler.schedule()

    assert plan is not None
    assert unpack_ints(plan.batches[0].scheduled, 4).tolist() == [[0, 4, 3, 3]]
    assert plan.graph is not None and (plan.graph.num_tokens, plan.graph.query_len) == (3, 3)


def test_accepted_drafts_are_computed_and_rejected_ones_are_not() -> None:
    scheduler = start_drafting()
    found = []
    for tokens in ([51, 52, 53], [54], [55, 56]):
        plan = scheduler.schedule()
        assert plan is not None
        found.append(
            (
                unpack_ints(plan.batches[0].appended, 2)[:, 1].tolist(),
                unpack_ints(plan.batches[0].scheduled, 4)[0, 1],
            )
        )
        finish(scheduler, tokens, counts=pack_ints([len(tokens)]))

    assert found == [([50], 4), ([51, 52, 53], 7), ([54], 8)]
    assert scheduler.ranks[0].rows.computed.tolist() == [10]
    stats = scheduler.stats()
    assert (stats["drafts"], stats["draft_tokens"], stats["accepted_tokens"]) == (3, 6, 3)
    assert scheduler.accepted_by_position == [2, 1]


def test_a_mixed_step_verifies_drafts_beside_a_prompt() -> None:
    scheduler = start_drafting()

    plan = start(scheduler, make_request("b", 6, first=100))
    outputs = finish(scheduler, [51, 52, 60], counts=pack_ints([2, 1]))

    assert unpack_ints(plan.batches[0].scheduled, 4).tolist() == [[0, 4, 3, 3], [1, 0, 6, 1]]
    assert plan.graph is None
    assert [output.tokens for output in outputs] == [[51, 52], [60]]
    assert scheduler.stats()["draft_tokens"] == 2


def test_prompts_as_long_as_a_decode_step_do_not_replay_its_graph() -> None:
    scheduler = make_scheduler(dp=1, num_drafts=2)

    plan = start(scheduler, make_request("a", 3))

    assert plan.graph is None


@pytest.mark.parametrize(
    ("params", "tokens", "expected", "reason"),
    [
        ({}, [51, EOS, 52], [51, EOS], "stop"),
        ({"max_tokens": 3}, [51, 52, 53], [51, 52], "length"),
        ({"max_tokens": 3}, [51, EOS, 53], [51, EOS], "stop"),
        ({"min_tokens": 3, "max_tokens": 9}, [EOS, 52, 53], [EOS, 52, 53], None),
        ({"min_tokens": 2, "max_tokens": 9}, [51, EOS, 53], [51, EOS], "stop"),
    ],
)
def test_tokens_after_the_end_of_a_request_are_dropped(params, tokens, expected, reason) -> None:
    scheduler = start_drafting(params=params)
    entries = tuple(RowLogprobs(pack_ints([token]), (0.0,), 1) for token in tokens)

    output = verify(scheduler, *tokens, logprobs=entries)

    assert (output.tokens, output.finish_reason) == (expected, reason)
    assert output.logprobs == entries[: len(expected)]
    if reason is not None:
        assert scheduler.ranks[0].pool.num_used == 0


def test_blocks_cover_drafts_only_as_far_as_the_request_can_go() -> None:
    scheduler = start_drafting(num_tokens=14, num_blocks=2, params={"max_tokens": 3})

    # The step runs the positions 14, 15 and 16. The request ends before it needs the KV of position
    # 16.
    verify(scheduler, 51)

    assert [len(request.block_ids) for request in scheduler.running] == [1]


def test_a_steady_batch_gets_a_block_before_its_drafts_need_it() -> None:
    scheduler = start_drafting(num_tokens=8)
    found = []

    for tokens in ([51], [52, 53, 54], [55, 56, 57], [58]):
        plan = scheduler.schedule()
        assert plan is not None
        found.append(unpack_ints(plan.batches[0].blocks, 3).tolist())
        finish(scheduler, tokens, counts=pack_ints([len(tokens)]))

    # A block has 16 tokens. The four steps write up to the positions 10, 11, 14 and 17.
    assert found == [[], [], [], [[0, 1, 2]]]


@pytest.mark.parametrize(
    ("tokens", "counts"),
    [([51], []), ([51, 52], [1]), ([51, 52, 53, 54], [4]), ([], [0]), ([51, 52], [1, 1])],
)
def test_counts_that_cannot_be_end_the_epoch(tokens: list[int], counts: list[int]) -> None:
    scheduler = start_drafting()
    scheduler.schedule()

    with pytest.raises(WorkerError, match="requests were sampled at 3 positions"):
        finish(scheduler, tokens, counts=pack_ints(counts))
