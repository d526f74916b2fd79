"""Default sizes and padding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.buckets import capture_sizes, pad_to_bucket


def test_sizes_are_dense_when_small_and_end_with_the_largest_batch() -> None:
    assert capture_sizes(32) == (1, 2, 4, 8, 16, 24, 32)
    assert capture_sizes(77)[-3:] == (64, 72, 77)
    assert capture_sizes(300)[-4:] == (256, 272, 288, 300)
    assert capture_sizes(4096)[-1] == 512 and len(capture_sizes(4096)) == 51


def test_speculation_rounds_sizes_up_to_whole_requests() -> None:
    assert capture_sizes(5, query_len=3) == (3, 6, 9, 15)
    assert capture_sizes(4096, query_len=3)[-1] == 510


def test_sequence_parallelism_keeps_multiples_of_tp() -> None:
    assert capture_sizes(20, sequence_parallel=8) == (8, 16, 24)


def test_requested_sizes_gain_the_largest_batch_and_lose_what_lies_above() -> None:
    assert capture_sizes(12, requested=[64, 8, 2, 2]) == (2, 8, 12)


def test_no_common_multiple_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="common multiple"):
        capture_sizes(32, query_len=7, sequence_parallel=128)


@given(st.integers(1, 4096), st.integers(1, 8), st.sampled_from([1, 2, 4, 8, 16]))
def test_every_size_is_a_whole_number_of_units(max_num_seqs, query_len, tp) -> None:
    sizes = capture_sizes(max_num_seqs, query_len=query_len, sequence_parallel=tp)

    assert list(sizes) == sorted(set(sizes))
    assert all(size % query_len == 0 and size % tp == 0 and size <= 512 for size in sizes)


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
