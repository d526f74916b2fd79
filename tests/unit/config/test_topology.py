"""Laws of the layout of ranks in groups, and the groups of well-known deployments."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.errors import ConfigError
from dist_aclgraph.topology import GROUP_KINDS, ParallelLayout


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    pcp = draw(st.sampled_from([1, 2]))
    dp = draw(st.integers(1, 4))
    dcp = draw(st.sampled_from([d for d in (1, 2, 4) if tp * pcp % d == 0]))
    spans = [tp * pcp * n for n in range(1, dp + 1) if dp % n == 0]
    return ParallelLayout(tp=tp, dp=dp, pcp=pcp, dcp=dcp, ep=draw(st.sampled_from([1, *spans])))


@given(layouts())
def test_rank_and_coordinates_are_a_bijection(layout: ParallelLayout) -> None:
    ranks = range(layout.world_size)

    points = [layout.coordinates(rank) for rank in ranks]

    assert [layout.rank_of(point) for point in points] == list(ranks)
    assert points == sorted(points)
    assert {(p.dp < layout.dp, p.pcp < layout.pcp, p.tp < layout.tp) for p in points} == {
        (True, True, True)
    }


@given(layouts(), st.sampled_from(GROUP_KINDS))
def test_groups_of_a_kind_partition_the_ranks_evenly(layout: ParallelLayout, kind) -> None:
    groups = layout.groups(kind)

    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {getattr(layout, kind)}
    assert all(layout.group_of(kind, rank) == group for group in groups for rank in group)


@given(layouts())
def test_lockstep_groups_are_the_finest_partition_that_no_domain_crosses(layout) -> None:
    groups = layout.lockstep_groups

    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for domain in layout.domains:
        assert len({layout.lockstep_group_of(rank) for rank in domain}) == 1
    for group in groups:
        reached = {group[0]}
        for _ in group:
            reached.update(*(d for d in layout.domains if reached & set(d)))
        assert reached == set(group)


def test_dense_copies_are_separate_groups() -> None:
    layout = ParallelLayout(tp=8, dp=4)

    assert layout.lockstep_groups == tuple(
        tuple(range(start, start + 8)) for start in (0, 8, 16, 24)
    )
    assert layout.domains_of(9) == (tuple(range(8, 16)),)


def test_experts_across_copies_join_them_into_one_group() -> None:
    layout = ParallelLayout(tp=8, dp=4, ep=32)

    assert layout.lockstep_groups == (tuple(range(32)),)
    assert layout.domains_of(9) == (tuple(range(32)), tuple(range(8, 16)))


def test_groups_of_equal_ranks_are_one_domain() -> None:
    assert ParallelLayout(tp=4, dcp=4, ep=4).domains == ((0, 1, 2, 3),)


def test_mc2_has_a_domain_of_its_own_beside_that_of_the_experts() -> None:
    layout = ParallelLayout(tp=2, dp=2, ep=4, mc2=True)

    assert layout.domains_of(1) == ((0, 1), (0, 1, 2, 3), (0, 1, 2, 3))
    assert layout.mc2_domains == ((0, 1, 2, 3),)
    assert layout.lockstep_groups == ((0, 1, 2, 3),)
    assert layout.within_group.mc2_domains == layout.mc2_domains
    assert ParallelLayout(tp=2, mc2=True).mc2_domains == ()


def test_a_single_rank_has_no_domain() -> None:
    layout = ParallelLayout()

    assert layout.domains == ()
    assert layout.lockstep_groups == ((0,),)


def test_data_parallel_groups_stride_over_the_copies() -> None:
    assert ParallelLayout(tp=2, dp=3).groups("dp") == ((0, 2, 4), (1, 3, 5))


def test_decode_context_groups_take_neighbouring_tp_ranks() -> None:
    assert ParallelLayout(tp=4, dcp=2).groups("dcp") == ((0, 1), (2, 3))


def test_decode_context_groups_span_prefill_ranks_first() -> None:
    groups = ParallelLayout(tp=2, pcp=2, dcp=2).groups("dcp")

    assert groups == ((0, 2), (1, 3))
    assert all(b - a == 2 for group in groups for a, b in pairwise(group))


def test_each_domain_of_shared_contexts_is_counted_once() -> None:
    # In ``spread``, the TP, PCP, DCP and EP groups have different ranks. In ``same``, the DCP and
    # PCP groups have the same ranks, so they are one domain.
    spread = ParallelLayout(tp=2, pcp=2, dp=2, dcp=4, ep=8)
    same = ParallelLayout(tp=8, pcp=2, dp=4, dcp=2, ep=64)

    assert set(spread.domains_of(5)) == {(4, 5), (5, 7), (4, 5, 6, 7), tuple(range(8))}
    assert sorted(len(domain) for domain in same.domains_of(0)) == [2, 8, 64]
    assert same.groups("pcp") == same.groups("dcp")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 2, "dp": 3, "ep": 4}, r"parallel.ep is 4; .* multiple of tp x pcp \(2\)"),
        ({"tp": 2, "pcp": 2, "dp": 2, "ep": 2}, r"parallel.ep is 2; .* multiple of tp x pcp \(4\)"),
        ({"tp": 2, "dcp": 3}, r"parallel.dcp is 3; .* divides tp x pcp \(2\)"),
        ({"tp": 4, "pcp": 4, "dcp": 2}, r"parallel.dcp is 2; .* 1, or a multiple of pcp \(4\)"),
        ({"tp": 0}, "parallel.tp is 0; it must be positive"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelLayout(**sizes)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 4"):
        ParallelLayout(tp=4).coordinates(4)
