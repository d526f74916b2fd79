from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.expert_placement import ExpertPlacement, place_experts


@st.composite
def placements(draw: st.DrawFn) -> tuple[ExpertPlacement, int, list[float] | None]:
    """Draw a placement of experts, its number of ranks, and the loads of its experts."""
    ep, num_experts = draw(st.integers(1, 12)), draw(st.integers(1, 24))
    redundant = -num_experts % ep + ep * draw(st.integers(0, 3))
    load = st.floats(0, 10, allow_nan=False)
    loads = draw(st.none() | st.lists(load, min_size=num_experts, max_size=num_experts))
    return place_experts(num_experts, ep, redundant, loads), ep, loads


@given(placements())
def test_every_rank_has_equally_many_slots_and_every_expert_has_a_slot(drawn) -> None:
    placement, ep, _ = drawn

    assert len(placement.ranks) == ep
    assert {len(experts) for experts in placement.ranks} == {placement.per_rank}
    assert {expert for rank in placement.ranks for expert in rank} == set(
        range(placement.num_experts)
    )


@given(placements())
def test_the_table_names_the_slots_of_each_expert(drawn) -> None:
    placement, *_ = drawn
    flat = [expert for rank in placement.ranks for expert in rank]
    *rows, padding = placement.slot_table().tolist()

    assert len(rows) == placement.num_experts
    for expert, slots in enumerate(rows):
        assert set(slots) == {slot for slot, here in enumerate(flat) if here == expert}
    assert set(padding) == {placement.num_slots}


@given(st.integers(1, 40), st.integers(1, 40))
def test_without_copies_a_slot_has_the_id_of_its_expert(per_rank: int, ep: int) -> None:
    placement = place_experts(per_rank * ep, ep)

    assert not placement.has_copies
    assert placement.slots == tuple((expert,) for expert in range(per_rank * ep))


@pytest.mark.parametrize(("ep", "redundant"), [(3, 2), (6, 2), (2, 4), (4, 4)])
def test_copies_of_an_expert_are_on_different_ranks(ep: int, redundant: int) -> None:
    placement = place_experts(4, ep, redundant)

    assert all(len(set(rank)) == len(rank) for rank in placement.ranks)


@pytest.mark.parametrize(
    ("ep", "redundant", "per_rank"), [(320, 64, 1), (288, 32, 1), (72, 32, 4), (144, 32, 2)]
)
def test_deepseeks_experts_fit_on_large_groups(ep: int, redundant: int, per_rank: int) -> None:
    placement = place_experts(256, ep, redundant)

    assert placement.per_rank == per_rank
    assert max(map(len, placement.slots)) == 2
    loads = [sum(1 / len(placement.slots[expert]) for expert in rank) for rank in placement.ranks]
    assert max(loads) - min(loads) <= 0.5, "the load of one copy"


def test_busy_experts_get_the_copies() -> None:
    placement = place_experts(4, 2, 2, [1.0, 9.0, 1.0, 1.0])

    assert list(map(len, placement.slots)) == [1, 3, 1, 1]
    assert all(1 in rank for rank in placement.ranks)


def test_experts_that_ranks_cannot_share_are_refused_with_the_number_of_copies_that_helps() -> None:
    with pytest.raises(ConfigError, match=r"256 experts, or .*redundant_experts .*: 64 would do"):
        place_experts(256, 320)
    with pytest.raises(ConfigError, match=r"256 experts and 63 copies, or .*: 64 would do"):
        place_experts(256, 320, 63)
