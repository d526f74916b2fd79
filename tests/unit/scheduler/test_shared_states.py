"""If a model has recurrent state, requests share a prefix only if the prefix's blocks and a
checkpoint at the prefix's end exist.

A state of the fake worker is a checksum of tokens. When a request continues, the worker checks that
the state is the checksum of the request's own tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, repeat

import pytest

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.checkpoints import Checkpoints
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.prefixes import Prefixes
from dist_aclgraph.scheduler.scheduler import Scheduler
from tests.plans import make_plan
from tests.unit.scheduler.fake_worker import FakeGroup, FakeWorker
from tests.unit.scheduler.requests import submit

BLOCK = 4
PROMPT = list(range(100, 113))  # three full blocks, and one token


class Group:
    """A scheduler and a fake worker. Tests run requests one after another, or together."""

    def __init__(
        self,
        num_checkpoints: int,
        *,
        interval: int = 1,
        num_blocks: int = 40,
        compile_steps: Sequence[int] = (),
    ) -> None:
        self.checkpoints = Checkpoints(num_checkpoints, interval)
        self.pool = BlockPool(num_blocks, BLOCK, checkpoints=self.checkpoints)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=32),
            [self.pool],
            GraphDispatcher(make_plan(1, 2)),
            max_model_len=64,
        )
        self.cached: dict[str, int] = {}  # for each request, the number of its cached tokens
        self.rows: list[int] = []  # for each start of a request, its row
        self.num_tokens = 0  # number of tokens that all steps have run
        self.got: Counter[str] = Counter()  # for each request, the number of tokens that it got
        self._worker = FakeWorker(num_blocks, BLOCK, has_state=True)
        steps = chain(compile_steps, repeat(0))
        self._group = FakeGroup([self._worker], compile_steps=lambda: next(steps))

    @property
    def num_starts(self) -> int:
        return len(self.rows)

    def submit(self, name: str, prompt: Sequence[int], count: int = 1, salt: str = "") -> None:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        self.scheduler.add(submit(name, prompt, params, cache_salt=salt))

    def turn(self) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.rows += [start.row for start in plan.batches[0].started]
        self.num_tokens += int(unpack_ints(plan.batches[0].scheduled, 4)[:, 2].sum())
        for output in self.scheduler.update(self._group.execute(plan)):
            self.got[output.request_id] += len(output.tokens)
            if output.num_cached_tokens is not None:
                self.cached.setdefault(output.request_id, output.num_cached_tokens)

    def abort_devices(self) -> None:
        """Abort the devices: all running requests wait again, and then start from their
        checkpoints.
        """
        self._worker.resume(0)
        self.scheduler.rewind(self.scheduler.epoch + 1)

    def serve(self, name: str, prompt: Sequence[int], salt: str = "") -> int:
        """Run a request to its end; return the number of its tokens that were cached."""
        self.submit(name, prompt, salt=salt)
        while self.scheduler.has_work:
            self.turn()
        return self.cached[name]


def test_states_are_shared_only_by_requests_with_the_same_salt() -> None:
    group = Group(num_checkpoints=12)
    salts = ["x", "y", "", "x", ""]

    found = [group.serve(str(i), PROMPT, salt) for i, salt in enumerate(salts)]

    assert found == [0, 0, 0, 12, 12]


def test_blocks_without_a_checkpoint_are_not_shared() -> None:
    group = Group(num_checkpoints=1)
    group.serve("donor", PROMPT)
    assert group.serve("hit", [*PROMPT, 1]) == 12
    group.serve("other", [*range(5)])  # this request overwrites the only checkpoint

    assert group.pool.num_cached >= 4, "the blocks are there"
    assert group.serve("late", PROMPT) == 0


def test_a_prefix_ends_at_the_last_checkpoint_that_is_left() -> None:
    group = Group(num_checkpoints=2, interval=2)
    group.serve("donor", PROMPT)  # this request stores checkpoints after 8 and after 12 tokens
    group.serve("other", [*range(5)])  # this request overwrites the older checkpoint

    assert group.serve("long", PROMPT) == 12
    assert group.serve("short", [*PROMPT[:8], 1, 2]) == 0


def test_a_checkpoint_without_all_of_its_blocks_is_not_used() -> None:
    """The first block of the prefix was evicted. The last block, with the checkpoint, is still in
    the cache.
    """
    group = Group(num_checkpoints=2, num_blocks=5)
    pool, request = group.pool, submit("r", PROMPT[:9], SamplingParams())
    prefixes = Prefixes(pool)
    prefixes.match(request)  # computes the hashes of the request's two blocks
    for block, block_hash in zip(pool.allocate(2), request.hashes, strict=True):
        pool.store(block, block_hash)
        pool.free([block])  # the block that is freed first is evicted first
    group.checkpoints.begin(request.hashes[1])
    group.checkpoints.store(request.hashes[1])
    assert len(prefixes.match(request)) == 2

    pool.allocate(3)

    assert group.checkpoints.longest(request.hashes) == 2, "the checkpoint is there"
    assert prefixes.match(request) == []


@pytest.mark.parametrize("donor", ["has ended", "runs", "was preempted"])
def test_a_prefix_is_shared_whatever_its_donor_does(donor: str) -> None:
    group = Group(num_checkpoints=8)
    group.submit("donor", PROMPT, count=1 if donor == "has ended" else 9)
    for _ in range(5):
        if group.scheduler.has_work:
            group.turn()
    if donor == "was preempted":
        group.abort_devices()
    group.submit("heir", [*PROMPT, 1], count=3)
    while group.scheduler.has_work:
        group.turn()

    assert group.cached == {"donor": 0, "heir": 12}


def test_a_request_waits_outside_its_row_while_its_grammar_compiles() -> None:
    group = Group(num_checkpoints=0, compile_steps=[5])
    group.submit("form", range(100, 131), count=2)
    group.turn()
    group.submit("other", range(200, 231), count=9)
    for _ in range(4):
        group.turn()

    assert group.got == {"other": 4}
    assert group.num_starts == 2, "each request has started once"
    assert group.scheduler.stats()["waiting"] == 1
    while group.scheduler.has_work:
        group.turn()
    assert group.got == {"form": 2, "other": 9}
    assert group.num_starts == 3


def test_a_request_that_compiles_alone_repeats_only_the_tokens_after_its_last_checkpoint() -> None:
    group = Group(num_checkpoints=3, interval=9, compile_steps=[5, 0, 4])
    group.submit("form", PROMPT, count=3)
    while group.scheduler.has_work:
        group.turn()

    assert group.got == {"form": 3}
    assert group.num_starts == 1 + 5 + 2, "each of the last two starts runs two tokens"
    assert group.num_tokens <= len(PROMPT) + 2 + (group.num_starts - 1) * BLOCK


@pytest.mark.parametrize("num_steps", [3, 20, 70])
def test_a_request_that_compiles_alone_runs_one_token_per_step(num_steps: int) -> None:
    """There are no checkpoints. Nevertheless, the prompt is not computed again in each step while
    the grammar is compiled.
    """
    prompt = range(100, 131)
    group = Group(num_checkpoints=0, compile_steps=[num_steps])
    group.submit("form", prompt, count=2)
    while group.scheduler.has_work:
        group.turn()

    assert group.got == {"form": 2}
    assert group.num_starts == 2 + (num_steps - 1) // len(prompt)
    assert group.num_tokens <= 2 * len(prompt) + num_steps + 1


def test_a_request_that_runs_one_token_per_step_waits_in_its_row_while_others_run() -> None:
    group = Group(num_checkpoints=0, compile_steps=[12])
    group.submit("form", range(100, 131), count=2)
    for _ in range(4):
        group.turn()
    group.submit("other", range(200, 231), count=30)
    while "form" not in group.got:
        group.turn()

    assert group.num_tokens == 31 + 3 + 31 + 8 + 28, "only the other request runs"
    assert group.num_starts == 3


def test_a_request_returns_to_the_row_in_which_its_grammar_was_compiled() -> None:
    group = Group(num_checkpoints=3, compile_steps=[3])
    group.submit("form", PROMPT, count=2)
    group.turn()
    group.submit("other", range(200, 213), count=9)
    while group.scheduler.has_work:
        group.turn()

    assert group.got == {"form": 2, "other": 9}
    assert group.rows == [0, 1, 0]


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_request_that_compiles_alone_starts_again_or_is_aborted(is_aborted: bool) -> None:
    group = Group(num_checkpoints=0, compile_steps=[3])
    group.submit("form", PROMPT, count=2)
    group.turn()
    if is_aborted:
        group.scheduler.abort("form")
    while group.scheduler.has_work:
        group.turn()

    assert group.got["form"] == (0 if is_aborted else 2)
    assert group.pool.num_used == 0
