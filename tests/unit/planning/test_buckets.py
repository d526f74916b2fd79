from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.config import Config, make_config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.buckets import (
    asked_sizes,
    buffer_sizes,
    candidate_families,
    capture_sizes,
    lazy_families,
    pad_to_bucket,
)
from dist_aclgraph.planning.descriptor import BatchDescriptor


def test_sizes_are_dense_when_small_and_end_with_the_largest_batch() -> None:
    assert capture_sizes(32, 512) == (1, 2, 4, 8, 16, 24, 32)
    assert capture_sizes(77, 512)[-3:] == (64, 72, 77)
    assert capture_sizes(300, 512)[-4:] == (256, 272, 288, 300)
    assert capture_sizes(4096, 512)[-1] == 512 and len(capture_sizes(4096, 512)) == 51
    assert capture_sizes(4096, 2048)[-1] == 2048


def test_speculation_rounds_sizes_up_to_whole_requests() -> None:
    assert capture_sizes(15, 512, 3) == (3, 6, 9, 15)
    assert capture_sizes(4096 * 3, 512, 3)[-1] == 510


@given(st.integers(1, 4096), st.integers(1, 8), st.integers(8, 1024))
def test_every_size_is_a_whole_number_of_requests(max_num_seqs, query_len, max_tokens) -> None:
    sizes = capture_sizes(max_num_seqs * query_len, max_tokens, query_len)

    assert list(sizes) == sorted(set(sizes))
    assert all(size % query_len == 0 and 0 < size <= max_tokens for size in sizes)


def make(**changes: Any) -> Config:
    return make_config({"model": "m", **changes})


@pytest.mark.parametrize(
    ("mode", "captured"),
    [
        ("NONE", []),
        ("FULL_DECODE_ONLY", [(1, 6)]),
        ("PIECEWISE", [(32, 256)]),
        ("FULL_AND_PIECEWISE", [(1, 6), (32, 256)]),
    ],
)
def test_a_mode_is_asked_for_the_sizes_that_it_has(
    mode: str, captured: list[tuple[int, ...]]
) -> None:
    config = make(graph={"mode": mode, **asked_sizes(mode, (1, 6), (32, 256))})

    assert [family.buckets for family in candidate_families(config)] == captured


def test_asked_sizes_are_the_ones_that_are_captured() -> None:
    config = make(
        graph={"mode": "FULL_AND_PIECEWISE", "sizes": [1, 6], "mixed_sizes": [32, 256]},
        scheduler={"max_num_seqs": 16},
    )
    large = make(
        graph={"sizes": [1, 600, 1024], "max_tokens": 1024},
        scheduler={"max_num_seqs": 1024, "max_num_batched_tokens": 4096},
    )

    assert [family.buckets for family in candidate_families(config)] == [(1, 6), (32, 256)]
    assert [family.buckets for family in candidate_families(large)] == [(1, 600, 1024)]


def test_with_drafts_the_mode_full_has_graphs_of_both_kinds_of_batches() -> None:
    config = make(
        graph={"mode": "FULL", "sizes": [2, 6], "mixed_sizes": [32, 256]},
        scheduler={"max_num_seqs": 16},
        speculative={"num_tokens": 1},
    )

    decode, mixed = candidate_families(config)

    assert (decode.run_mode, decode.query_len, decode.buckets) == ("FULL", 2, (2, 6))
    assert (mixed.run_mode, mixed.query_len, mixed.buckets) == ("FULL", 0, (32, 256))


def test_one_graph_is_captured_where_continuations_are_exact() -> None:
    config = make(recovery={"exact": True}, scheduler={"max_num_seqs": 24})

    assert [family.buckets for family in candidate_families(config)] == [(24,)]
    assert lazy_families(config) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"graph": {"sizes": [1, 600]}}, "sizes has 600; graph.max_tokens is 512"),
        ({"graph": {"sizes": [1, 64]}}, "no batch has more than 32 tokens"),
        ({"graph": {"sizes": [4, 2]}}, "each larger than the one before"),
        ({"graph": {"sizes": [2, 3]}, "speculative": {"num_tokens": 1}}, "a multiple of 2 tokens"),
        ({"graph": {"mode": "FULL", "mixed_sizes": [8]}}, "mixed_sizes has no effect in mode FULL"),
        ({"graph": {"mixed_traffic": {8: 1.0}}}, "mixed_traffic has no effect in mode FULL_DEC"),
    ],
)
def test_sizes_that_cannot_be_had_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


sizes, counts = st.integers(1, 600), st.integers(1, 99)
graphs = st.lists(
    st.one_of(
        st.builds(lambda n: BatchDescriptor(n, 0, 0, "PIECEWISE"), sizes),
        st.builds(lambda n, q: BatchDescriptor(n * q, n, q, "FULL"), counts, st.integers(1, 4)),
        st.builds(lambda n, r: BatchDescriptor(n, r, 0, "FULL"), sizes, counts),
    )
)


@given(graphs, st.integers(1, 64))
def test_buffers_hold_every_graph_and_no_more(found: list[BatchDescriptor], rows: int) -> None:
    sizes = buffer_sizes(found, rows)
    each = [buffer_sizes([graph], rows) for graph in found]

    assert tuple(sizes) == tuple(map(max, zip((1, 1, 1), *each, strict=True)))
    for graph, own in zip(found, each, strict=True):
        assert own.num_tokens == graph.num_tokens
        if graph.mode == "FULL":
            assert own.num_reqs == graph.num_reqs
            assert own.num_samples == (graph.num_tokens if graph.query_len else graph.num_reqs)
        else:
            assert own == (graph.num_tokens, min(graph.num_tokens, rows), 1)


buckets = st.sets(st.integers(1, 600), min_size=1).map(sorted)


@given(buckets, st.integers(1, 700), st.integers(1, 700))
def test_padding_is_monotone_idempotent_and_never_too_small(sizes, a, b) -> None:
    low, high = pad_to_bucket(min(a, b), sizes), pad_to_bucket(max(a, b), sizes)

    assert high is None or (low is not None and low <= high)
    if low is not None:
        assert low >= min(a, b)
        assert pad_to_bucket(low, sizes) == low
    else:
        assert min(a, b) > sizes[-1]
