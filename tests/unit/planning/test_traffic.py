"""The weights of traffic decay with time and are summed over groups. Each batch counts for the
family that replays it.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.config import make_config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.buckets import GraphFamily, stepped_sizes, trim_sizes
from dist_aclgraph.planning.traffic import PRIOR_SHARE, Traffic, fade, merge, prior, weights_of
from tests.plans import choose

histograms = st.dictionaries(st.integers(1, 600), st.floats(0.01, 1e6), max_size=20)
traffics = st.builds(Traffic, decode=histograms, mixed=histograms)
DECODE = GraphFamily(run_mode="FULL", query_len=1, buckets=(1, 8, 32))
MIXED = GraphFamily(run_mode="PIECEWISE", query_len=0, buckets=(1, 64, 512))


@given(traffics, st.floats(0, 100), st.floats(0, 100))
def test_traffic_fades_by_time_alone_however_often_it_is_asked(traffic, first, second) -> None:
    at_once = fade(traffic, first + second, 10.0)

    assert fade(fade(traffic, first, 10.0), second, 10.0).weight == pytest.approx(at_once.weight)
    assert fade(traffic, 10.0, 10.0).weight == pytest.approx(traffic.weight / 2)


@given(st.lists(traffics, max_size=4), st.randoms())
def test_groups_add_up_in_any_order(parts, rng) -> None:
    whole = merge(parts)

    assert whole.weight == pytest.approx(sum(part.weight for part in parts))
    again = merge(rng.sample(parts, len(parts)))
    assert again.decode == pytest.approx(whole.decode) and list(again.decode) == list(whole.decode)


@given(traffics)
def test_every_batch_counts_once_where_it_is_replayed(traffic) -> None:
    decode, mixed = weights_of(traffic, [DECODE, MIXED])

    # A batch that is larger than all buckets also has a weight, although no choice of buckets
    # changes its cost.
    small = sum(w for n, w in traffic.decode.items() if n <= 32)
    rest = traffic.weight - small
    for seen, found in ((small, decode), (rest, mixed)):
        if seen:
            assert sum(found.values()) == pytest.approx(seen * (1 + PRIOR_SHARE))
    assert max(decode) <= 32


def test_a_family_alone_takes_decode_batches_too() -> None:
    (found,) = weights_of(Traffic(decode={8: 3.0}, mixed={100: 1.0}), [MIXED])

    assert found[8] > 3.0 and found[100] > 1.0
    assert 0 < found[7] < 0.1  # this size was never observed, but is possible


def test_before_anything_was_seen_small_sizes_lie_dense() -> None:
    sizes = stepped_sizes(512)

    found = choose(sizes, prior(512), sizes, 6)

    # trim_sizes chooses sizes at equal distances in the list. This leaves a wide gap above size 1,
    # in which small batches get much padding.
    assert trim_sizes(sizes, 6)[:3] == [1, 64, 144]
    assert found[:3] == (8, 40, 104)
    gaps = [b - a for a, b in pairwise((0, *found))]
    assert gaps == sorted(gaps)


def test_decode_batches_of_several_tokens_are_multiples() -> None:
    family = GraphFamily(run_mode="FULL", query_len=3, buckets=(3, 12))

    (found,) = weights_of(None, [family])

    assert found == {3: 1 / 3, 6: 1 / 6, 9: 1 / 9, 12: 1 / 12}


def test_traffic_comes_from_the_configuration_and_travels() -> None:
    graph = make_config({"model": "m", "graph": {"traffic": {8: 3, 32: 0.5}}}).graph
    traffic = Traffic.from_config(graph)

    assert traffic == Traffic(decode={8: 3.0, 32: 0.5})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(traffic), type=Traffic) == traffic
    assert msgspec.json.decode(msgspec.json.encode(traffic), type=Traffic) == traffic
    with pytest.raises(ConfigError, match="positive token counts"):
        make_config({"model": "m", "graph": {"mixed_traffic": {0: 1}}})
