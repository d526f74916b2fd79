"""Laws of two functions. One function finds the files that each node of a group has. The other
function finds the files that each node of another group reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.config import make_config
from dist_aclgraph.kv.group_files import GroupFiles, routes
from dist_aclgraph.kv.tiers import CachePlace
from dist_aclgraph.shapes.model_facts import read_model_facts
from dist_aclgraph.topology import ParallelLayout

MODELS = Path(__file__).parents[3] / "models"
HEADS = 4  # key-value heads of the model


@dataclass(frozen=True)
class Layout:
    """A group: tensor parallel size, shards of the context, data-parallel size, and nodes."""

    tp: int
    dcp: int
    files: GroupFiles

    @property
    def ranks(self) -> range:
        return range(len(self.files.node_ids))


def places_of(tp: int, dcp: int, kv_heads: int, *, has_state: bool) -> tuple[CachePlace, ...]:
    layout, num_heads = ParallelLayout(tp=tp, dcp=dcp), min(tp, kv_heads) if kv_heads else 1
    return tuple(
        CachePlace(
            heads=rank * num_heads // tp,
            num_heads=num_heads,
            shard=layout.group_of("dcp", rank).index(rank),
            num_shards=dcp,
            rank=rank,
            num_ranks=tp,
            has_state=has_state,
            num_kv_heads=kv_heads,
        )
        for rank in range(tp)
    )


@st.composite
def layouts(draw: st.DrawFn, kv_heads: int, dcp: int, *, has_state: bool) -> Layout:
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n >= dcp]))
    dp = draw(st.integers(1, 2))
    places = places_of(tp, dcp, kv_heads, has_state=has_state)
    node_ids = draw(st.lists(st.sampled_from("abc"), min_size=tp * dp, max_size=tp * dp))
    return Layout(tp, dcp, GroupFiles(places, tuple(node_ids)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Draw the layouts of a source and of a reader that have the same model and the same number of
    shards.
    """
    kv_heads, has_state = draw(st.sampled_from([0, 1, HEADS])), draw(st.booleans())
    # Ranks with the same head share the context, so each head must have at least as many copies as
    # there are shards.
    dcp = draw(st.sampled_from([1, 2])) if kv_heads < HEADS else 1
    source, reader = (
        draw(layouts(kv_heads, dcp, has_state=has_state), label=name) for name in ("from", "to")
    )
    return source, reader


def grains(places: Sequence[CachePlace]) -> list[tuple[int, int]]:
    """Return (head, shard) for each part of a block that the workers at ``places`` keep, with
    repetitions.
    """
    found = []
    for place in places:
        heads = [0]
        if (part := place.part) is not None:
            heads = list(range(part.first, part.first + part.size))
        found += [(head, place.shard) for head in heads]
    return found


def held_by(layout: Layout, node_id: str) -> tuple[set[tuple[int, int]], set[int]]:
    """Return what the workers on a node keep: (head, shard) of blocks, and the ranks whose states
    they have.
    """
    there = [
        layout.files.places[rank % len(layout.files.places)]
        for rank in layout.ranks
        if layout.files.node_ids[rank] == node_id
    ]
    return set(grains(there)), {place.rank for place in there}


@given(pairs(), st.sampled_from("abcd"), st.integers(0, 3))
def test_each_part_that_a_node_needs_is_read_once_from_a_node_that_has_it(
    pair: tuple[Layout, Layout], renamed: str, turn: int
) -> None:
    source, reader = pair
    first, nodes = source.files.places[0], source.files.nodes
    for rank in reader.ranks:
        readers, node_id = reader.files.places_beside(rank), reader.files.node_ids[rank]
        here = nodes.index(node_id) if node_id in nodes else None
        for route in routes(first, source.files.holders, readers, here=here, turn=turn):
            chosen = [first.all_places[index] for index in route.blocks]
            covered = grains(chosen)
            assert len(covered) == len(set(covered)), "a part is read twice"
            assert set(covered) >= set(grains(readers)), "a part is not read"
            for index, place in zip(route.blocks, chosen, strict=True):
                assert set(grains([place])) & set(grains(readers)), "a file that nobody needs"
                node = route.blocks[index]
                holder = node_id if node is None else nodes[node]
                assert (node is None) == (here is not None and holder == node_id)
                assert set(grains([place])) <= held_by(source, holder)[0]
            if first.has_state:
                assert sorted(route.states) == sorted({place.rank for place in readers})
            for state, node in route.states.items():
                holder = node_id if node is None else nodes[node]
                assert state in held_by(source, holder)[1]


@given(pairs())
def test_a_node_that_the_source_does_not_use_has_a_route_to_each_data_parallel_rank(
    pair: tuple[Layout, Layout],
) -> None:
    source, reader = pair
    may_read = not source.files.places[0].has_state or source.tp == reader.tp
    for rank in reader.ranks:
        found = routes(
            source.files.places[0], source.files.holders, reader.files.places_beside(rank)
        )
        assert len(found) == (len(source.files.holders) if may_read else 0)
        for route, holders in zip(found, source.files.holders, strict=False):
            assert all(node in holders.blocks[index] for index, node in route.blocks.items())


@given(layouts(HEADS, 1, has_state=False))
def test_workers_serve_and_fetch_on_all_nodes_but_the_engines(layout: Layout) -> None:
    files = layout.files
    all_nodes = replace(files, only_workers=True)
    assert [files.node_ids[rank] for rank in files.servers] == list(files.nodes[1:])
    assert [files.node_ids[rank] for rank in all_nodes.servers] == list(files.nodes)
    for dp_rank in range(files.num_dp):
        there = {files.node_ids[rank] for rank in files.ranks_of(dp_rank)}
        found = [files.node_ids[rank] for rank in all_nodes.finders(dp_rank)]
        assert sorted(found) == sorted(there)
        rest = [node_id for node_id in found if node_id != files.nodes[0]]
        assert [files.node_ids[rank] for rank in files.finders(dp_rank)] == rest


@given(pairs())
def test_all_nodes_of_a_data_parallel_rank_together_read_all_its_files(
    pair: tuple[Layout, Layout],
) -> None:
    """If the data-parallel rank has only one node, this node reads all files of the source."""
    source, reader = pair
    if source.files.places[0].has_state and source.tp != reader.tp:
        return
    first, files = source.files.places[0], reader.files
    for dp_rank in range(files.num_dp):
        nodes = {files.node_ids[rank]: rank for rank in files.ranks_of(dp_rank)}
        read: set[int] = set()
        for rank in nodes.values():
            [*found] = routes(first, source.files.holders, files.places_beside(rank))
            read |= found[0].blocks.keys()
        assert read == set(range(len(first.all_places)))


@given(pairs())
def test_each_node_of_a_data_parallel_rank_has_one_worker_that_finds_files(
    pair: tuple[Layout, Layout],
) -> None:
    files = pair[0].files
    assert [files.node_ids[rank] for rank in files.servers] == list(files.nodes[1:])
    for dp_rank in range(files.num_dp):
        finders = files.finders(dp_rank)
        nodes = {files.node_ids[rank] for rank in files.ranks_of(dp_rank)}
        assert len(finders) == len(nodes - {files.nodes[0]})
        assert {files.node_ids[rank] for rank in finders} == nodes - {files.nodes[0]}
        assert files.is_beside_engine(dp_rank) == (files.nodes[0] in nodes)


def test_equal_groups_on_equal_numbers_of_nodes_read_only_their_own_parts() -> None:
    places = places_of(4, 1, HEADS, has_state=False)
    source, reader = GroupFiles(places, tuple("aabb")), GroupFiles(places, tuple("ccdd"))
    assert [
        route.blocks
        for rank in (0, 2)
        for route in routes(places[0], source.holders, reader.places_beside(rank))
    ] == [{0: 0, 1: 0}, {2: 1, 3: 1}]


def test_nodes_with_the_same_files_are_used_in_turn() -> None:
    """With latent attention, all workers have the same latents, so their files have the same
    contents.
    """
    places = places_of(4, 1, 0, has_state=False)
    holders = GroupFiles(places, tuple("aabb")).holders
    found = [routes(places[0], holders, places, turn=turn)[0].blocks[0] for turn in range(4)]
    assert found == [0, 1, 0, 1]


def test_a_node_with_other_data_parallel_ranks_reads_from_the_nodes_of_the_others() -> None:
    places = places_of(2, 1, 2, has_state=False)
    holders = GroupFiles(places, tuple("aabbaa")).holders
    assert len(holders) == 2, "two ranks on the same node have the same holders"
    assert [r.blocks for r in routes(places[0], holders, places, here=0)] == [{0: 1, 1: 1}]
    assert routes(places[0], holders[:1], places, here=0) == []


def test_other_shards_and_states_of_other_ranks_are_not_read() -> None:
    places = places_of(2, 1, 2, has_state=True)
    holders = GroupFiles(places, tuple("ab")).holders
    assert routes(places[0], holders, [replace(place, num_ranks=4) for place in places]) == []
    assert routes(places[0], holders, [replace(place, interleave=8) for place in places]) == []


@pytest.mark.parametrize(
    ("model", "parallel", "expected"),
    [
        ("tiny-qwen3", {"tp": 2}, [(0, 0), (1, 0)]),
        ("tiny-deepseek", {"tp": 2}, [(0, 0), (0, 0)]),
        ("tiny-deepseek", {"tp": 2, "dcp": 2}, [(0, 0), (0, 1)]),
        ("tiny-deepseek", {"tp": 2, "pcp": 2, "dcp": 2}, [(0, 0), (0, 0), (0, 1), (0, 1)]),
    ],
)
def test_places_follow_from_the_configuration(
    model: str, parallel: dict[str, int], expected: list[tuple[int, int]]
) -> None:
    config = make_config(
        {"model": str(MODELS / model), "kv": {"host_gib": 1}, "parallel": parallel}
    )
    facts = read_model_facts(config.model, {})
    files = GroupFiles.of(config, facts, "ab" * (len(expected) // 2))
    assert files is not None
    assert [(place.heads, place.shard) for place in files.places] == expected
    without = make_config({"model": str(MODELS / model), "parallel": parallel})
    assert GroupFiles.of(without, facts, "ab") is None
