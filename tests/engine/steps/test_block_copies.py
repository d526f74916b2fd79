"""With KV blocks from files, requests get the same tokens as with computed blocks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.block_copier import BlockCopier
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.kv.block_files import BlockFiles
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.checkpoints import Checkpoints
from dist_aclgraph.kv.look_ups import look_ups_of
from dist_aclgraph.kv.tiers import KVTiers
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.routing import block_hashes
from dist_aclgraph.scheduler.scheduler import Scheduler
from tests.checkpoints import add_next_token_module, make_reference
from tests.engine.runners import BLOCK_SIZE, MAX_LEN, make_runner, turn
from tests.plans import make_plan
from tests.unit.scheduler.requests import submit

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[(7 * i + j) % 90 + 3 for j in range(40 + 9 * i)] for i in range(4)]
ROWS = 4
NUM_FULL = sum(
    (len(prompt) - 1) // BLOCK_SIZE for prompt in PROMPTS
)  # number of blocks that a prefix can have
FAMILIES = {
    "deepseek": "DeepseekV3ForCausalLM",
    "hybrid": "Qwen3NextForCausalLM",
    "int8": "GlmMoeDsaForCausalLM",  # with latents in int8
}
WAIT_S = 180.0


class Service:
    """A scheduler and its only worker. The worker's cache is empty at first."""

    def __init__(
        self,
        runner: ModelRunner,
        tiers: KVTiers,
        num_drafts: int = 0,
        num_blocks: int = 64,
        states: KVTiers | None = None,
    ) -> None:
        self.runner = runner
        runner.caches.zero()
        self.tokens: dict[str, list[int]] = {}
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=64),
            [BlockPool(num_blocks, BLOCK_SIZE, checkpoints=states and Checkpoints(ROWS, 1))],
            GraphDispatcher(plan_of(num_drafts)),
            max_model_len=MAX_LEN,
            num_drafts=num_drafts,
            look_ups=look_ups_of(tiers, states),
        )

    @property
    def counts(self) -> dict[str, int]:
        return self.scheduler.copies.counts()

    def add(self, name: str, prompt: Sequence[int], **options: Any) -> None:
        self.tokens[name] = []
        self.scheduler.add(submit(name, prompt, PARAMS, **options))

    def turn(self) -> None:
        for delta in turn(self.scheduler, self.runner):
            self.tokens[delta.request_id] += delta.token_ids
        (jobs,) = self.scheduler.copies.take_jobs(is_idle=not self.runner.is_busy)
        for number, num_whole in self.runner.copy_blocks(jobs):
            self.scheduler.copies.end(number, 0, num_whole)

    def finish(self) -> None:
        """Run turns until all requests and all copies of blocks have ended."""
        deadline_s = time.monotonic() + WAIT_S
        while self.scheduler.has_work or self.scheduler.copies.is_busy:
            self.turn()
            assert time.monotonic() < deadline_s
        assert self.scheduler.ranks[0].pool.num_used == 0

    def answer(self, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any) -> list[list[int]]:
        names = [f"{len(self.tokens) + i}" for i in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.add(name, prompt, **options)
        self.finish()
        return [self.tokens[name] for name in names]


def plan_of(num_drafts: int) -> GraphPlan:
    return make_plan(ROWS * (num_drafts + 1), query_len=num_drafts + 1, max_num_seqs=ROWS)


def make_tiers(folder: Path, name: str = "rank") -> KVTiers:
    return KVTiers({"host": BlockFiles(folder, folder / name, 1 << 30)})


def make(
    npu: Npu,
    directory: Path,
    tiers: KVTiers,
    num_drafts: int = 0,
    states: KVTiers | None = None,
    kv_dtype: str = "auto",
) -> ModelRunner:
    """Return a runner with captured graphs."""
    graphs = plan_of(num_drafts).capture_order
    settings = {"dtype": "float32", "kv": {"block_size": BLOCK_SIZE, "dtype": kv_dtype}}
    files = {"tiers": tiers, "state_tiers": states}
    runner = make_runner(npu, directory, ROWS, graphs, num_drafts, settings, **files)
    for graph in graphs:
        runner.warm_up(graph)
        runner.capture(graph)
        runner.commit(graph)
    return runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def tiers(folder: Path) -> KVTiers:
    return make_tiers(folder)


@pytest.fixture(scope="module")
def runner(npu: Npu, checkpoint: Path, tiers: KVTiers) -> Iterator[ModelRunner]:
    runner = make(npu, checkpoint, tiers)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def expected(runner: ModelRunner, tiers: KVTiers) -> list[list[int]]:
    """Answer PROMPTS, and save all their blocks to files; return the answers."""
    service = Service(runner, tiers)
    answers = service.answer()
    assert service.counts["saved"] >= NUM_FULL and service.counts["unsaved"] == 0
    return answers


def test_a_new_group_finds_the_blocks_of_an_earlier_one(
    runner: ModelRunner, tiers: KVTiers, expected: list[list[int]]
) -> None:
    service = Service(runner, tiers)
    assert service.answer() == expected
    assert (service.counts["loaded"], service.counts["missed"]) == (NUM_FULL, 0)
    assert service.scheduler.num_cached_tokens == NUM_FULL * BLOCK_SIZE


@pytest.mark.parametrize(
    ("family", "num_drafts"),
    [("deepseek", 0), ("deepseek", 2), ("hybrid", 0), ("hybrid", 2), ("int8", 2)],
)
def test_other_caches_are_copied(npu: Npu, tmp_path: Path, family: str, num_drafts: int) -> None:
    """These caches are latents, recurrent states, and the blocks of a next-token module. After the
    copies, the same drafts are accepted.
    """
    make_reference(FAMILIES[family], tmp_path)
    if num_drafts:
        add_next_token_module(tmp_path)
    tiers = make_tiers(tmp_path / "files")
    states = make_tiers(tmp_path / "files", "states") if family == "hybrid" else None
    runner = make(npu, tmp_path, tiers, num_drafts, states, "int8" if family == "int8" else "auto")
    first = Service(runner, tiers, num_drafts, states=states)
    answers = first.answer()
    second = Service(runner, tiers, num_drafts, states=states)
    assert second.answer() == answers
    # There are fewer checkpoints than block boundaries, so a checkpoint may be overwritten before
    # it is copied.
    assert second.counts["loaded"] >= NUM_FULL - (family == "hybrid")
    assert second.scheduler.stats()["accepted_tokens"] == first.scheduler.stats()["accepted_tokens"]
    runner.close()


def test_a_damaged_file_costs_only_the_blocks_from_it_on(
    runner: ModelRunner, tiers: KVTiers, expected: list[list[int]], folder: Path
) -> None:
    longest = max(PROMPTS, key=len)
    hashes = block_hashes(pack_ints(longest), "", BLOCK_SIZE)
    path = folder / "rank" / hashes[1].hex()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    service = Service(runner, tiers)
    assert service.answer([longest]) == [expected[PROMPTS.index(longest)]]
    assert service.counts["loaded"] == 1
    assert service.counts["missed"] == len(hashes) - 1
    assert tiers.has(hashes[1])  # the file of this block was written again


def test_a_failure_at_the_second_tier_does_not_end_the_thread_for_files(
    runner: ModelRunner,
    tiers: KVTiers,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> bool:
        calls.append(None)
        raise RuntimeError("the disk is broken")

    calls: list[None] = []
    monkeypatch.setattr(tiers, "write_late", fail)
    service = Service(runner, tiers)
    assert service.answer() == expected
    assert service.answer([[5] * 40]) and service.counts["unsaved"] == 0
    assert len(calls) > 1


def test_blocks_of_other_salts_are_not_found(
    runner: ModelRunner, tiers: KVTiers, expected: list[list[int]]
) -> None:
    service = Service(runner, tiers)
    assert service.answer(cache_salt="private") == expected
    assert service.counts["loaded"] == 0


def test_preempted_requests_find_their_blocks_in_files(runner: ModelRunner, tiers: KVTiers) -> None:
    prompts = [[number] * 60 for number in (5, 6, 7)]  # each request grows from two blocks to three
    expected = Service(runner, tiers).answer(prompts)
    service = Service(runner, tiers, num_blocks=8)
    assert service.answer(prompts) == expected
    assert service.scheduler.num_preemptions > 0
    assert service.counts["loaded"] >= len(prompts)


def test_an_aborted_request_leaves_its_blocks_to_the_cache(
    runner: ModelRunner, tiers: KVTiers, expected: list[list[int]]
) -> None:
    service = Service(runner, tiers)
    service.add("a", PROMPTS[3])
    service.turn()
    assert service.scheduler.copies.is_running and not service.scheduler.running
    service.scheduler.abort("a")
    service.finish()
    assert service.answer([PROMPTS[3]]) == [expected[3]]
    assert service.counts["loaded"] == len(PROMPTS[3]) // BLOCK_SIZE  # only once


def test_a_block_that_cannot_be_written_delays_no_other_block(
    runner: ModelRunner, tiers: KVTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [13] * 100
    hashes, write = block_hashes(pack_ints(prompt), "", BLOCK_SIZE), tiers.write

    def refuse_first(block_hash: bytes, block: memoryview, depth: int = 0) -> bool:
        return block_hash != hashes[0] and write(block_hash, block, depth)

    monkeypatch.setattr(tiers, "write", refuse_first)
    service = Service(runner, tiers)
    service.answer([prompt])
    assert [tiers.has(each) for each in hashes] == [False, True, True]
    assert service.counts["unsaved"] == 1


def test_no_file_is_written_after_the_end_of_files(npu: Npu, tmp_path: Path) -> None:
    """After ``end_files``, the engine deletes all files. A file that was written later would stay
    for ever.
    """
    tiers, begun, goes_on = make_tiers(tmp_path), threading.Event(), threading.Event()
    name, write = bytes(16), tiers.write

    def wait(block_hash: bytes, block: memoryview, depth: int = 0) -> bool:
        begun.set()
        return goes_on.wait(WAIT_S) and write(block_hash, block, depth)

    tiers.write = wait  # type: ignore[method-assign]
    tensor = torch.zeros((4, 8), device=npu.device)
    copier = BlockCopier(npu, lambda: [tensor], tiers)
    copier.begin(0, np.array([1]), [(name, 0)], is_load=False)
    while not begun.is_set():
        copier.advance()
    assert not copier.end_files(0.0)
    goes_on.set()
    assert copier.end_files(WAIT_S) and tiers.has(name)


def test_files_of_condemned_blocks_are_deleted(runner: ModelRunner, tiers: KVTiers) -> None:
    service, prompt = Service(runner, tiers), [9] * 100
    service.answer([prompt])
    hashes = block_hashes(pack_ints(prompt), "", BLOCK_SIZE)
    assert all(map(tiers.has, hashes))
    service.scheduler.copies.ranks[0].condemn(hashes[1:])
    service.finish()
    assert [tiers.has(each) for each in hashes] == [True] + [False] * (len(hashes) - 1)


def test_a_prefix_in_the_cache_touches_its_files(
    runner: ModelRunner, tiers: KVTiers, folder: Path
) -> None:
    service, prompt = Service(runner, tiers), [11] * 100
    service.answer([prompt])
    hashes = block_hashes(pack_ints(prompt), "", BLOCK_SIZE)
    paths = [folder / "rank" / each.hex() for each in hashes]
    for path in paths:
        os.utime(path, (1.0, 1.0))
    service.answer([prompt])
    (jobs,) = service.scheduler.copies.take_jobs(is_idle=True, may_touch=True)
    service.runner.copy_blocks(jobs)
    service.finish()
    times = [path.stat().st_mtime for path in paths]
    assert min(times) > 1.0 and times == sorted(times, reverse=True), "later blocks look older"


def test_a_job_that_touches_many_files_lets_other_work_go_first(npu: Npu, tmp_path: Path) -> None:
    tiers, order = make_tiers(tmp_path), list[str]()
    begun, goes_on, write = threading.Event(), threading.Event(), tiers.write

    def touch(block_hash: bytes, depth: int) -> None:
        begun.set()
        assert goes_on.wait(WAIT_S)
        order.append("touch")

    def note(block_hash: bytes, block: memoryview, depth: int = 0) -> bool:
        order.append("write")
        return write(block_hash, block, depth)

    tiers.touch, tiers.write = touch, note  # type: ignore[method-assign]
    tensor = torch.zeros((4, 8), device=npu.device)
    copier = BlockCopier(npu, lambda: [tensor], tiers)
    copier.begin_upkeep(0, "touch", [(bytes([n] * 16), n) for n in range(3)])
    assert begun.wait(WAIT_S)
    copier.begin(1, np.array([1]), [(bytes(16), 0)], is_load=False)
    while copier._for_files.empty():
        copier.advance()
    goes_on.set()
    ended: list[tuple[int, int]] = []
    while len(ended) < 2:
        ended += copier.advance()
    assert order == ["touch", "write", "touch", "touch"]
    assert sorted(ended) == [(0, 0), (1, 1)]
    copier.close()


def test_copies_end_with_an_abort_of_the_device(
    runner: ModelRunner, tiers: KVTiers, expected: list[list[int]]
) -> None:
    service = Service(runner, tiers)
    for index, prompt in enumerate(PROMPTS):
        service.add(str(index), prompt)
    service.turn()
    assert service.scheduler.copies.is_running
    runner.forget_steps()
    service.scheduler.rewind(epoch=0)
    assert not service.scheduler.copies.is_running
    service.finish()
    assert [service.tokens[str(index)] for index in range(len(PROMPTS))] == expected
