"""Recorded steps remain after the end of their process, and show which rank of a group stopped
first.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from dist_aclgraph.actors.worker import step_recorder
from dist_aclgraph.actors.worker.step_recorder import (
    KEPT_FILES,
    NUM_STEPS,
    FileRecorder,
    RecordedSteps,
    batch_digest_of,
    digest_of,
    read_recording,
)
from dist_aclgraph.actors.worker.stopped_ranks import explain_stop, status_of
from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.cli.explain import read_groups
from dist_aclgraph.comm.collective_place import (
    AFTER,
    BEFORE,
    EMBEDDING,
    HEAD,
    KINDS,
    CollectivePlace,
)
from dist_aclgraph.errors import DeviceError, EngineDeadError
from dist_aclgraph.planning.commands import GraphCommand
from dist_aclgraph.steps.step import RankBatch, RankPlan, StepSize
from tests.plans import decode_graph

names = itertools.count()


def make_plan(
    step: int, *, num_reqs: int = 2, position: int = 7, graph: Any = None, **shared: Any
) -> RankPlan:
    scheduled = pack_ints(np.array([[row, position, 3, 1] for row in range(num_reqs)], np.int32))
    return RankPlan(1, step, 4, graph, 0, RankBatch(scheduled), **shared)


class Rank:
    """A rank that records its steps as a worker does. It runs in the test's process."""

    def __init__(self, folder: Path, rank: int) -> None:
        own = folder / str(next(names))
        self.recorder = FileRecorder(own, rank, rank)
        (self._path,) = own.iterdir()

    def run(self, *plans: RankPlan) -> Rank:
        """Record the step of each plan in ``plans``, from its beginning to its end."""
        for plan in plans:
            self.begin(plan)
            self.recorder.lap("read")
            self.recorder.idle()
        return self

    def begin(self, plan: RankPlan) -> Rank:
        """Record a step up to the replay of its graph."""
        self.recorder.begin(plan)
        for stage in ("rows", "inputs", "upload", "replay"):
            self.recorder.lap(stage)
        return self

    def wait(self, plan: RankPlan) -> Rank:
        self.begin(plan).recorder.wait(True)
        return self

    @property
    def recording(self) -> RecordedSteps:
        return read_recording(self._path)


@pytest.fixture
def ranks(tmp_path: Path) -> list[Rank]:
    """Return three ranks that have recorded two steps."""
    return [Rank(tmp_path, rank).run(make_plan(0), make_plan(1)) for rank in range(3)]


def explain(ranks: list[Rank]) -> tuple[tuple[int, ...], str]:
    found = explain_stop([rank.recording for rank in ranks])
    return found.blamed, found.sentence


def test_a_recording_has_the_last_steps(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 5).run(*(make_plan(step) for step in range(NUM_STEPS + 3)))
    rank.recorder.join(2)
    rank.begin(make_plan(NUM_STEPS + 3, num_reqs=4, graph=decode_graph(8)))

    found = rank.recording
    assert (found.rank, found.group, found.pid) == (5, 2, os.getpid())
    assert [step.step for step in found.steps] == list(range(4, NUM_STEPS + 4))
    last = found.steps[-1]
    assert (last.epoch, last.plan_version, last.graph) == (1, 4, "FULL 8")
    assert (last.num_reqs, last.num_tokens) == (4, 12)
    assert list(last.laps_us) == ["rows", "inputs", "upload", "replay"]
    assert list(last.laps_us.values()) == sorted(last.laps_us.values())
    assert found.steps[-2].graph == "eager" and "read" in found.steps[-2].laps_us
    assert status_of(found) == "is stuck on its host, after the stage replay"


def test_a_recording_outlives_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tests.actors.engine.test_step_recorder import Rank, make_plan\n"
        "rank = Rank(Path(sys.argv[1]), 1).run(make_plan(0)).wait(make_plan(1))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)

    assert done.returncode == -signal.SIGKILL
    (path,) = tmp_path.glob("*/*")
    found = read_recording(path)
    assert [step.step for step in found.steps] == [0, 1]
    assert status_of(found) == "waits for its device"


@pytest.mark.parametrize("size", [0, 8, step_recorder.SIZE])
def test_other_files_are_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "file").write_bytes(bytes(size))

    with pytest.raises(ValueError, match="no steps"):
        read_recording(tmp_path / "file")


def test_old_files_of_ranks_that_ended_in_order_are_removed(tmp_path: Path) -> None:
    killed = FileRecorder(tmp_path / "steps", 99, 0)
    for rank in range(KEPT_FILES + 5):
        FileRecorder(tmp_path / "steps", rank, rank).end()

    left = [read_recording(path).rank for path in (tmp_path / "steps").iterdir()]
    assert len(left) <= KEPT_FILES + 2
    assert 99 in left and killed is not None


def test_ranks_of_an_earlier_deployment_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    # The second deployment has fewer ranks, and numbers its groups from 0 again.
    for num_ranks in (3, 2):
        recorders = [FileRecorder(folder, rank, rank) for rank in range(num_ranks)]
        for recorder in recorders:
            recorder.join(0)
            recorder.idle()

    [ranks] = read_groups(tmp_path).values()

    assert [recording.rank for recording in ranks] == [0, 1]


def test_a_full_disk_leaves_a_rank_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", refuse)

    with pytest.raises(OSError, match="no space left"):
        FileRecorder(tmp_path / "steps", 0, 0)


def test_a_host_that_has_waited_is_in_its_earlier_state(ranks: list[Rank]) -> None:
    ranks[0].recorder.command(GraphCommand(1, 3, "capture", decode_graph(8)))
    ranks[0].recorder.wait(True)
    assert status_of(ranks[0].recording) == "waits for its device"

    ranks[0].recorder.wait(False)
    assert status_of(ranks[0].recording) == "is stuck in capture full decode 8"


def test_plans_that_differ_have_different_digests() -> None:
    plans = [make_plan(1), make_plan(2), make_plan(1, largest=StepSize(9, 9))]
    plans += [make_plan(1, graph=decode_graph(8)), make_plan(1, exchange="mc2")]
    batches = [make_plan(1), make_plan(1, position=8), make_plan(1, num_reqs=3)]

    assert len({digest_of(plan) for plan in plans}) == len(plans)
    assert len({batch_digest_of(plan) for plan in batches}) == len(batches)
    assert {digest_of(plan) for plan in batches} == {digest_of(make_plan(1))}
    assert {batch_digest_of(plan) for plan in plans} == {batch_digest_of(make_plan(1))}


# ---- which rank stopped first


def test_a_rank_with_another_plan_is_blamed(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.wait(make_plan(2, position=8 if rank is ranks[1] else 7))

    blamed, sentence = explain(ranks)
    assert blamed == (1,)
    assert sentence == "rank 1 got another plan of step 2 than the other ranks"


def test_a_rank_with_another_size_of_the_step_is_blamed(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.wait(make_plan(2, largest=StepSize(8 if rank is ranks[2] else 7, 2)))

    assert explain(ranks)[0] == (2,)


def test_ranks_of_different_batches_have_the_same_plan(ranks: list[Rank]) -> None:
    for index, rank in enumerate(ranks):
        plan = make_plan(2, position=7 + index)
        rank.wait(structs.replace(plan, dp_rank=index))

    assert explain(ranks)[0] == ()


def test_a_killed_rank_is_blamed_by_those_that_were_told_to_stop(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.wait(make_plan(2))
    ranks[0].recorder.end()
    ranks[2].recorder.end()

    blamed, sentence = explain(ranks)
    assert blamed == (1,)
    assert (
        "rank 1 ended or hangs without a word (in step 2, rank 1 waits for its device)" in sentence
    )


def test_a_rank_that_never_began_the_last_step_is_blamed(ranks: list[Rank]) -> None:
    ranks[0].wait(make_plan(2))
    ranks[1].wait(make_plan(2))

    blamed, sentence = explain(ranks)
    assert (blamed, sentence) == ((2,), "rank 2 never began step 2: rank 2 waits for a plan")


def test_a_rank_that_is_stuck_on_its_host_is_blamed(ranks: list[Rank]) -> None:
    ranks[0].wait(make_plan(2))
    ranks[1].begin(make_plan(2))
    ranks[2].wait(make_plan(2))

    blamed, sentence = explain(ranks)
    assert blamed == (1,)
    assert "in step 2, rank 1 is stuck on its host, after the stage replay" in sentence


def test_the_first_failure_is_named(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.wait(make_plan(2))
    ranks[1].recorder.fail(DeviceError("a link is down"))
    ranks[0].recorder.fail(DeviceError("the peer is gone"))
    ranks[2].recorder.fail(EngineDeadError("told to leave"))
    ranks[1].recorder.end()  # after its failure, the rank is told to stop

    blamed, sentence = explain(ranks)
    assert (blamed, sentence) == (
        (1,),
        "rank 1 failed first, in step 2: DeviceError: a link is down",
    )


def test_no_recorded_rank_is_blamed_if_all_ranks_wait(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.wait(make_plan(2))

    blamed, sentence = explain(ranks)
    assert blamed == ()
    assert sentence.startswith("all ranks waited for their devices in step 2")


def test_a_device_that_is_behind_in_a_layer_is_blamed(ranks: list[Rank]) -> None:
    for number, rank in zip((1, 0, 1), ranks, strict=True):
        place = CollectivePlace(0, 5, AFTER, number, "all_reduce")
        rank.wait(make_plan(2)).recorder.see((2, place.code))

    blamed, sentence = explain(ranks)
    assert blamed == (1,)
    assert "in step 2: rank 1 stalled, and the others waited for it" in sentence
    assert (
        "began: rank 1 all_reduce 1 of layer 5 after attention (step 2); "
        "rank 0, 2 all_reduce 2 of layer 5 after attention (step 2)"
    ) in sentence


def test_a_device_in_an_earlier_step_is_behind(ranks: list[Rank]) -> None:
    head = CollectivePlace(0, HEAD, BEFORE, 0, "all_gather")
    for step, rank in zip((2, 2, 1), ranks, strict=True):
        rank.wait(make_plan(2)).recorder.see((step, head.code if step == 1 else 0))

    blamed, sentence = explain(ranks)
    assert blamed == (2,)
    assert "rank 2 all_gather 1 of the head (step 1)" in sentence
    assert "rank 0, 1 no collective yet (step 2)" in sentence


def test_the_collective_in_which_all_devices_stopped_is_named(ranks: list[Rank]) -> None:
    place = CollectivePlace(1, 61, AFTER, 1, "mc2_combine")
    for rank in ranks:
        rank.wait(make_plan(2)).recorder.see((2, place.code))

    blamed, sentence = explain(ranks)
    assert blamed == ()
    assert "rank 0, 1, 2 mc2_combine 2 of draft 1, layer 61 after attention" in sentence


def test_codes_of_collectives_have_the_order_of_a_step() -> None:
    places = [
        CollectivePlace(draft_pass, layer, part, number, kind)
        for draft_pass in range(3)
        for layer in (EMBEDDING, 0, 1, 60, HEAD)
        for part in range(3)
        for number in range(4)
        for kind in KINDS[:1]
    ]
    codes = [place.code for place in places]

    assert codes[0] > 0 and codes == sorted(set(codes))
    assert [CollectivePlace.of_code(code) for code in codes] == places


def test_the_engine_is_named_if_it_has_ended(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.recorder.fail(EngineDeadError("the connection to the engine has ended"))

    assert explain(ranks) == ((), "the engine ended without a word after step 1")


def test_the_engine_is_named_if_it_sends_no_step(ranks: list[Rank]) -> None:
    assert explain(ranks) == ((), "no rank was at work: the engine sent nothing after step 1")


def test_ranks_that_were_told_to_stop_are_not_blamed(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.recorder.end()

    expected = "no rank stopped by itself: all ranks were told to stop after step 1"
    assert explain(ranks) == ((), expected)


def test_a_rank_that_is_stuck_in_a_capture_is_blamed(ranks: list[Rank]) -> None:
    ranks[2].recorder.command(GraphCommand(1, 3, "capture", decode_graph(8)))

    blamed, sentence = explain(ranks)
    assert blamed == (2,)
    assert "rank 2 is stuck in capture full decode 8" in sentence


def test_a_slow_rank_is_named_by_the_waits_of_the_others(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = itertools.count(10**18, 1000)
    monkeypatch.setattr(step_recorder.time, "time_ns", lambda: next(now_ns))
    for step in range(2, 20):
        for rank in ranks:
            rank.begin(make_plan(step))
            for _ in range(10 if rank is ranks[0] else 5_000):  # one microsecond each
                next(now_ns)
            rank.recorder.lap("read")
            rank.recorder.idle()

    blamed, sentence = explain(ranks)
    assert blamed == (0,)
    assert "no rank stopped" in sentence and "rank 0 is slow" in sentence
