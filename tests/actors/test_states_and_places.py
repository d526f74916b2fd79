from __future__ import annotations

import itertools
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dist_aclgraph.actors.placement import plan_bundles
from dist_aclgraph.actors.run_directory import RunDirectory
from dist_aclgraph.actors.state import TRANSITIONS, IllegalTransitionError, State, advance
from dist_aclgraph.errors import PlacementError
from dist_aclgraph.topology import ParallelLayout

WAY = (
    State.PLACING, State.JOINING, State.LOADING, State.NEGOTIATING, State.CAPTURING,
    State.SERVING, State.DRAINING, State.STOPPED,
)  # fmt: skip


def test_the_way_of_a_deployment_is_allowed() -> None:
    for current, following in itertools.pairwise(WAY):
        assert advance(current, following) is following


def test_a_deployment_without_graphs_goes_from_negotiation_to_serving() -> None:
    assert advance(State.NEGOTIATING, State.SERVING) is State.SERVING


@pytest.mark.parametrize("state", [s for s in State if s is not State.STOPPED])
def test_an_error_may_stop_every_state(state: State) -> None:
    assert advance(state, State.STOPPED) is State.STOPPED


@pytest.mark.parametrize("state", list(State))
def test_nothing_leads_out_of_stopped(state: State) -> None:
    with pytest.raises(IllegalTransitionError, match="STOPPED"):
        advance(State.STOPPED, state)


def test_every_state_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(State)


def test_serving_before_loading_is_refused() -> None:
    with pytest.raises(IllegalTransitionError, match="PLACING to SERVING"):
        advance(State.PLACING, State.SERVING)


def test_a_group_that_fits_one_node_stays_on_one() -> None:
    request = plan_bundles(4, {"a": 2.0, "b": 8.0}, is_emulated=False)

    assert request.strategy == "STRICT_PACK"
    assert request.bundles == [{"NPU": 1}] * 4


def test_a_group_larger_than_any_node_spreads() -> None:
    assert plan_bundles(10, {"a": 8.0, "b": 8.0}, is_emulated=False).strategy == "PACK"


def test_ranks_that_share_contexts_are_placed_together() -> None:
    layout = ParallelLayout(tp=4, pcp=2, dcp=8, dp=3)

    requests = [
        plan_bundles(len(ranks), {"a": 8.0, "b": 8.0, "c": 8.0}, is_emulated=False)
        for ranks in layout.lockstep_groups
    ]

    assert [(len(each.bundles), each.strategy) for each in requests] == [(8, "STRICT_PACK")] * 3


def test_too_few_npus_name_what_there_is() -> None:
    with pytest.raises(
        PlacementError,
        match=r"needs 10 NPUs.*has 9 \(a: 8, b: 1\).*lower parallel.tp, parallel.pcp",
    ):
        plan_bundles(10, {"a": 8.0, "b": 1.0}, is_emulated=False)


def test_emulated_npus_need_no_declaration() -> None:
    request = plan_bundles(2, {"a": 0.0}, is_emulated=True)

    assert len(request.bundles) == 2
    assert all("NPU" not in bundle for bundle in request.bundles)


def test_a_cluster_without_npus_is_refused_on_hardware() -> None:
    with pytest.raises(PlacementError):
        plan_bundles(1, {"a": 0.0}, is_emulated=False)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_run_directory_is_private(temporary: Path) -> None:
    directory = RunDirectory()

    assert stat.S_IMODE(os.stat(directory.path).st_mode) == 0o700
    directory.remove()


def test_directories_of_dead_owners_are_swept(temporary: Path) -> None:
    make = "from dist_aclgraph.actors.run_directory import RunDirectory as R; print(R().path)"
    dead = subprocess.run(
        [sys.executable, "-c", make],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert Path(dead).is_dir()

    RunDirectory().remove()

    assert not Path(dead).exists()


def test_directories_of_living_owners_stay_whatever_their_process_ids(temporary: Path) -> None:
    mine = RunDirectory()  # as one of another container: its name says nothing of processes
    foreign = temporary / "dist-aclgraph-notes"
    foreign.mkdir()

    RunDirectory().remove()

    assert Path(mine.path).exists()
    assert foreign.exists()
    mine.remove()


def test_removing_a_run_directory_twice_is_fine(temporary: Path) -> None:
    directory = RunDirectory()

    directory.remove()
    directory.remove()

    assert not Path(directory.path).exists()
