"""Laws of the placement groups that are requested from Ray, and of the order of ranks, for any
placement that Ray may choose.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import Mock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.actors.cluster.placement import (
    BundleRequest,
    Node,
    has_places,
    leading_node,
    plan_bundles,
    rank_order,
)
from dist_aclgraph.actors.worker.rank_facts import WorkerInfo
from dist_aclgraph.actors.worker.worker_group import check_builds, check_devices, check_nodes
from dist_aclgraph.config import make_config
from dist_aclgraph.errors import PlacementError
from dist_aclgraph.topology import ParallelLayout
from dist_aclgraph.version import build

Landed = tuple[str, tuple[int, ...]]


def make_nodes(*npus: int) -> list[Node]:
    return [Node(f"{i:08}", f"10.0.0.{i}", count) for i, count in enumerate(npus, 1)]


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    tp, pcp, dp = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(3))
    spreads_experts = draw(st.booleans())
    return ParallelLayout(tp=tp, pcp=pcp, dp=dp, ep=tp * pcp * dp if spreads_experts else 1)


clusters = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(lambda npus: make_nodes(*npus))


def place(
    request: BundleRequest, nodes: list[Node], groups: int, draw: st.DrawFn
) -> list[list[Landed]] | None:
    """Draw a placement that Ray can choose. The placement uses any nodes with enough free NPUs, and
    any free NPUs of these nodes.

    With STRICT_PACK, a group is on one node. Return None if no node has enough free NPUs for a
    bundle.
    """
    free = {
        node.node_id: list(range(node.npus))
        for node in nodes
        if request.labels.items() <= dict(node.labels).items()
    }
    placed = []
    for _ in range(groups):
        landed: list[Landed] = []
        chosen = ""
        for _ in range(request.num_bundles):
            fits = [n for n, ids in free.items() if len(ids) >= request.ranks_of_bundle]
            if request.strategy == "STRICT_PACK":
                whole = [n for n, ids in free.items() if len(ids) >= request.size]
                fits = [chosen] if chosen else whole
            if not fits:
                return None
            chosen = draw(st.sampled_from(fits))
            ids = draw(st.permutations(free[chosen]))
            landed += [(chosen, (npu,)) for npu in ids[: request.ranks_of_bundle]]
            free[chosen] = sorted(ids[request.ranks_of_bundle :])
        placed.append(draw(st.permutations(landed)))
    return placed


@given(layouts(), clusters, st.data())
def test_every_rank_has_an_npu_and_no_tensor_parallel_group_spans_nodes(
    layout: ParallelLayout, nodes: list[Node], data: st.DataObject
) -> None:
    try:
        request = plan_bundles(layout, len(layout.lockstep_groups), nodes)
    except PlacementError:
        room = sum(node.npus // layout.tp for node in nodes) * layout.tp
        assert room < layout.world_size
        return
    groups = layout.lockstep_groups
    placed = place(request, nodes, len(groups), data.draw)
    assert placed is not None

    taken: Counter[str] = Counter()
    for ranks, landed in zip(groups, placed, strict=True):
        order = rank_order(landed)
        assert sorted(order) == list(range(len(ranks)))
        where = [landed[i] for i in order]
        assert where == sorted(where)  # ranks are sorted by node, then by NPU
        for first in range(0, len(ranks), layout.tp):
            assert len({node for node, _ in where[first : first + layout.tp]}) == 1
        taken.update(node for node, _ in where)
    assert taken.total() == layout.world_size
    assert all(taken[node.node_id] <= node.npus for node in nodes)


@given(layouts(), clusters)
def test_a_group_is_asked_for_on_one_node_where_all_groups_find_one(
    layout: ParallelLayout, nodes: list[Node]
) -> None:
    try:
        groups = len(layout.lockstep_groups)
        request = plan_bundles(layout, groups, nodes, tp_across_nodes=True)
    except PlacementError:
        assert sum(node.npus for node in nodes) < layout.world_size
        return

    size = len(layout.lockstep_groups[0])
    assert request.num_bundles * request.ranks_of_bundle == size
    one_each = sum(node.npus // size for node in nodes) >= groups
    assert (request.strategy == "STRICT_PACK") == one_each


@st.composite
def used_clusters(draw: st.DrawFn) -> tuple[list[Node], list[Node]]:
    """Draw nodes in at most two racks. Return two clusters of these nodes: one with all NPUs, and
    one with only the free NPUs.
    """
    racks = [{"rack": draw(st.sampled_from(["r1", "r2"]))} for _ in range(draw(st.integers(1, 5)))]
    nodes = [Node(f"{i:08}", "", draw(st.integers(0, 9)), rack) for i, rack in enumerate(racks)]
    return nodes, [replace(node, npus=draw(st.integers(0, node.npus))) for node in nodes]


@given(
    layouts(),
    st.integers(1, 4),
    used_clusters(),
    st.sampled_from([{}, {"rack": "r1"}]),
    st.booleans(),
    st.data(),
)
def test_there_is_room_exactly_where_ray_finds_places_and_then_bundles_can_be_planned(
    layout: ParallelLayout,
    count: int,
    cluster: tuple[list[Node], list[Node]],
    labels: dict[str, str],
    tp_across_nodes: bool,
    data: st.DataObject,
) -> None:
    plan = partial(plan_bundles, layout, count, labels=labels, tp_across_nodes=tp_across_nodes)
    nodes, free = cluster
    try:
        request = plan(nodes)
    except PlacementError:
        with pytest.raises(PlacementError):
            plan(free)
        return

    has_room = has_places(request, free, count)

    assert has_room == (place(request, free, count, data.draw) is not None)
    assert has_places(request, nodes, count)
    if has_room:
        plan(free)


def test_ranks_of_one_node_do_not_fit_into_free_npus_of_several_nodes() -> None:
    request = plan_bundles(ParallelLayout(tp=4, dp=3), 1, make_nodes(6, 6, 6))

    assert not has_places(request, make_nodes(2, 2, 2), 1)
    assert has_places(request, make_nodes(2, 6, 2), 1)


def test_another_group_is_placed_as_the_whole_deployment_was() -> None:
    layout = ParallelLayout(tp=2, dp=8, ep=8)

    assert plan_bundles(layout, 2, make_nodes(10, 6)).strategy == "PACK"
    assert plan_bundles(layout, 1, make_nodes(10, 6)).strategy == "PACK"
    assert plan_bundles(layout, 1, make_nodes(10)).strategy == "STRICT_PACK"


def test_npus_of_nodes_without_the_labels_are_no_room() -> None:
    nodes = [Node("a", "", 4, {"rack": "r1"}), Node("b", "", 4, {"rack": "r2"})]
    request = plan_bundles(ParallelLayout(tp=4), 1, nodes, {"rack": "r1"})

    assert has_places(request, nodes, 1)
    assert not has_places(request, nodes[1:], 1)


def test_any_node_has_room_where_nobody_declares_npus() -> None:
    request = plan_bundles(ParallelLayout(tp=2), 1, make_nodes(0), may_be_undeclared=True)

    assert has_places(request, make_nodes(0), 9)


def test_a_group_over_two_nodes_has_a_bundle_for_each_tensor_parallel_group() -> None:
    layout = ParallelLayout(tp=2, dp=2, ep=4)

    request = plan_bundles(layout, 1, make_nodes(0, 2, 2))

    assert request.bundles == [{"NPU": 2}] * 2
    assert request.strategy == "PACK"


def test_ranks_that_share_contexts_are_placed_together() -> None:
    request = plan_bundles(ParallelLayout(tp=4, pcp=2, dcp=8, dp=3), 3, make_nodes(8, 8, 8))

    assert request.bundles == [{"NPU": 4}] * 2
    assert request.strategy == "STRICT_PACK"


def test_the_error_for_too_few_npus_lists_the_npus_of_each_node() -> None:
    with pytest.raises(
        PlacementError,
        match=r"needs 10 NPUs.*has 9 \(10.0.0.1/00000001: 8, 10.0.0.2/00000002: 1\).*lower",
    ):
        plan_bundles(ParallelLayout(dp=10), 10, make_nodes(8, 1))


def test_one_group_of_several_needs_npus_for_itself_alone() -> None:
    left = make_nodes(0, 1, 1, 1)

    assert plan_bundles(ParallelLayout(dp=4), 1, left).bundles == [{"NPU": 1}]
    with pytest.raises(
        PlacementError, match=r"needs 4 NPUs for 4 times 1.* or add nodes with NPUs"
    ):
        plan_bundles(ParallelLayout(dp=4), 4, left)


def test_a_tensor_parallel_group_that_no_node_holds_is_refused_with_the_way_out() -> None:
    layout = ParallelLayout(tp=4, dp=2)

    with pytest.raises(
        PlacementError,
        match=r"2 times 4 NPUs \(parallel.tp\).*room for 1;.*parallel.tp_across_nodes=true",
    ):
        plan_bundles(layout, 2, make_nodes(5, 3))

    request = plan_bundles(layout, 2, make_nodes(5, 3), tp_across_nodes=True)
    assert request.bundles == [{"NPU": 1}] * 4


def test_nodes_are_chosen_by_their_labels() -> None:
    nodes = [Node("a", "10.0.0.1", 4, {"rack": "r1"}), Node("b", "10.0.0.2", 8, {"rack": "r2"})]

    assert plan_bundles(ParallelLayout(tp=4), 1, nodes, {"rack": "r1"}).labels == {"rack": "r1"}
    with pytest.raises(PlacementError, match=r"needs 8 NPUs on nodes with the labels rack=r1"):
        plan_bundles(ParallelLayout(tp=8), 1, nodes, {"rack": "r1"})
    with pytest.raises(PlacementError, match=r"no living node has the labels rack=r3.*10.0.0.2/b"):
        plan_bundles(ParallelLayout(tp=4), 1, nodes, {"rack": "r3"})


def test_emulated_npus_need_no_declaration() -> None:
    request = plan_bundles(ParallelLayout(tp=2), 1, make_nodes(0), may_be_undeclared=True)

    assert request.strategy == "STRICT_PACK"
    assert request.ranks_of_bundle == 2
    assert all("NPU" not in bundle for bundle in request.bundles)


def test_a_cluster_without_npus_is_refused_on_hardware() -> None:
    with pytest.raises(PlacementError, match="needs 1 NPUs"):
        plan_bundles(ParallelLayout(), 1, make_nodes(0))


def make_info(kind: str, host: str, *npu_ids: int) -> WorkerInfo:
    return WorkerInfo(host, "10.0.0.1", host, 1, npu_ids, kind)  # type: ignore[arg-type]


def test_devices_of_different_kinds_in_one_group_are_refused() -> None:
    with pytest.raises(PlacementError, match="emulated on b and npu on a"):
        check_devices([make_info("npu", "a", 0), make_info("emulated", "b", 0)])


@pytest.mark.parametrize(
    ("hosts", "wrong"),
    [("a" * 8 + "b" * 8, None), ("a" * 16, "a has 16"), ("b" * 12 + "a" * 4, "b has 12")],
)
def test_ranks_of_experts_that_mc2_does_not_take_on_a_node_are_refused(
    hosts: str, wrong: str | None
) -> None:
    infos = [make_info("npu", host, number) for number, host in enumerate(hosts)]

    with (
        nullcontext()
        if wrong is None
        else pytest.raises(
            PlacementError, match=rf"{wrong} of the 16 ranks .*parallel\.mc2_algorithm=fullmesh"
        )
    ):
        check_nodes(infos, 8)


def test_npus_that_ray_does_not_know_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"a has NPUs of which Ray knows nothing.*--resources"):
        check_devices([make_info("npu", "a"), make_info("npu", "a")])
    check_devices([make_info("emulated", "a")])


def test_tensor_parallel_groups_stay_on_a_node_unless_the_configuration_says_so() -> None:
    assert not make_config({"model": "m"}).parallel.tp_across_nodes


@given(layouts(), clusters, st.data())
def test_the_node_that_leads_a_group_is_that_of_its_first_rank(
    layout: ParallelLayout, nodes: list[Node], data: st.DataObject
) -> None:
    """The group's engine starts on the leading node, and all ranks of the group connect to it
    there.
    """
    landed = [
        (data.draw(st.sampled_from(nodes)).node_id, (npu,)) for npu in range(layout.world_size)
    ]
    table = {"bundles_to_node_id": {i: node for i, (node, _) in enumerate(landed)}}

    with patch("dist_aclgraph.actors.cluster.placement.placement_group_table", lambda group: table):
        leading = leading_node(Mock())

    assert leading == landed[rank_order(landed)[0]][0]


def test_hosts_with_another_version_are_named() -> None:
    here = replace(make_info("npu", "a"), build=build())
    check_builds([here])

    with pytest.raises(PlacementError, match=r"b has dist_aclgraph 0\.0\.1 .* install the same"):
        check_builds([replace(make_info("npu", "b"), build="0.0.1 with sources abc")])


def test_survivors_and_replacements_with_other_code_make_no_group() -> None:
    here = replace(make_info("npu", "a"), build=build())

    with pytest.raises(PlacementError, match="the ranks of one group run different code"):
        check_builds([here, replace(here, host="b", build="0.0.1 with sources abc")])
