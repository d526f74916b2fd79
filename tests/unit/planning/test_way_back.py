"""The facts about a group's failure decide in which way the group recovers."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.errors import DeviceFault
from dist_aclgraph.planning.way_back import (
    LOSES_KV,
    MAY_SURVIVE,
    SOUND_S,
    TRIES,
    Failure,
    Way,
    way_back,
)
from dist_aclgraph.topology import GroupRank

FAULTS = get_args(DeviceFault)


@pytest.mark.parametrize(
    ("faults", "in_a_row", "way"),
    [
        (["link"], 0, "RESUME"),
        (["link"], 1, "RESUME"),
        (["link"], 2, "REBUILD"),
        (["operator"], 0, "RESUME"),
        (["operator"], 1, "REBUILD"),
        (["link", "stopped"], 0, "RESUME"),
        (["link", "operator"], 1, "REBUILD"),
        (["ecc"], 0, "REBUILD"),
        (["uce"], 0, "REBUILD"),
        (["uce_tensor"], 0, "REBUILD"),
        (["uce_kv"], 0, "RECOMPUTE"),
        (["uce_kv", "stopped"], 0, "RECOMPUTE"),
        (["uce_kv"], 1, "REBUILD"),
        (["uce_kv", "uce"], 0, "REBUILD"),
        ([None], 0, "REBUILD"),
        (["link", None], 0, "REBUILD"),
        ([], 0, "REBUILD"),
    ],
)
def test_the_way_follows_from_the_faults_and_how_often_they_came(
    faults: list[DeviceFault | None], in_a_row: int, way: Way
) -> None:
    known = {GroupRank(rank): fault for rank, fault in enumerate(faults)}

    assert way_back(Failure(known, in_a_row=in_a_row)) == way


def test_every_fault_has_its_tries() -> None:
    assert TRIES.keys() == set(FAULTS)


faults_of_ranks = st.dictionaries(
    st.integers(0, 7).map(GroupRank), st.sampled_from([*FAULTS, None]), max_size=8
)


@given(faults_of_ranks, st.integers(0, 5))
def test_a_lost_process_or_a_refusing_configuration_never_resumes(
    faults: dict[GroupRank, DeviceFault | None], in_a_row: int
) -> None:
    lost = frozenset({GroupRank(0)})

    assert way_back(Failure(faults, lost, in_a_row)) == "REBUILD"
    assert way_back(Failure(faults, in_a_row=in_a_row, may_resume=False)) == "REBUILD"


@given(faults_of_ranks, st.integers(0, 5), st.sampled_from([*FAULTS, None]))
def test_further_faults_never_turn_a_rebuild_into_a_resume(
    faults: dict[GroupRank, DeviceFault | None], in_a_row: int, more: DeviceFault | None
) -> None:
    if faults and way_back(Failure(faults, in_a_row=in_a_row)) == "REBUILD":
        assert way_back(Failure({**faults, GroupRank(8): more}, in_a_row=in_a_row)) == "REBUILD"
        assert way_back(Failure(faults, in_a_row=in_a_row + 1)) == "REBUILD"


def test_no_group_resumes_for_ever() -> None:
    for fault in FAULTS:
        assert way_back(Failure({GroupRank(0): fault}, in_a_row=max(TRIES.values()))) == "REBUILD"


@given(
    faults_of_ranks,
    st.frozensets(st.integers(0, 7).map(GroupRank)),
    st.one_of(st.none(), st.floats(0.0, 2 * SOUND_S)),
    st.booleans(),
)
def test_an_epoch_that_is_over_is_rejoined_by_whoever_has_sound_weights(
    faults: dict[GroupRank, DeviceFault | None],
    lost: frozenset[GroupRank],
    served_s: float | None,
    may_resume: bool,
) -> None:
    sound = {
        rank
        for rank in map(GroupRank, range(8))
        if rank not in lost and faults.get(rank, "stopped") in MAY_SURVIVE
    }
    is_trusted = served_s is None or served_s >= SOUND_S

    way = way_back(
        Failure(faults, lost, may_resume=may_resume, is_over=True, size=8, served_s=served_s)
    )

    assert way == ("REJOIN" if sound and is_trusted and may_resume else "REBUILD")


def test_no_process_survives_a_fault_of_memory_that_is_not_located() -> None:
    assert set(FAULTS) - MAY_SURVIVE == {"suspect", "uce", "ecc"}
    assert None not in MAY_SURVIVE


@given(faults_of_ranks, st.integers(0, 5))
def test_a_group_that_comes_back_keeps_its_kv_only_where_no_rank_has_lost_it(
    faults: dict[GroupRank, DeviceFault | None], in_a_row: int
) -> None:
    way = way_back(Failure(faults, in_a_row=in_a_row))

    if way == "RESUME":
        assert not LOSES_KV & set(faults.values())
    if way == "RECOMPUTE":
        assert LOSES_KV & set(faults.values())
