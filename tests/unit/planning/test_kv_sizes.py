"""Laws of the KV lengths for which graphs with fixed KV lengths are captured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.config import make_config
from dist_aclgraph.planning.buckets import SMALLEST_KV_SIZE, kv_sizes


@given(st.integers(1, 1 << 20), st.sampled_from([16, 48, 128, 512]))
def test_each_request_finds_a_length_of_less_than_twice_its_own(max_len, block_size):
    kv, model = {"block_size": block_size}, {"model": "m"}
    sizes = kv_sizes(make_config({**model, "kv": kv, "graph": {"updates": "none"}}), max_len)

    assert list(sizes) == sorted(set(sizes))
    assert all(size % block_size == 0 for size in sizes)
    assert max_len <= sizes[-1] < max_len + block_size
    for length in {1, max_len, (max_len + 1) // 2, *(s + 1 for s in sizes[:-1])}:
        fitting = next(size for size in sizes if length <= size)
        assert fitting < max(2 * length, SMALLEST_KV_SIZE) + block_size


def test_graphs_whose_lengths_are_sent_accept_all_lengths():
    assert kv_sizes(make_config({"model": "m"}), 4096) == ()
