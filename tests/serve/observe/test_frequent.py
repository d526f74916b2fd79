from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from dist_aclgraph.serve.observe.frequent import FrequentHistogram

BOUNDS = (0.005, 0.5, 2.0)


@given(st.lists(st.sampled_from([0.0, 0.001, 0.005, 0.1, 0.5, 0.51, 2.0, 7.25])))
def test_the_fast_histogram_reports_the_same_values_as_the_librarys(values: list[float]):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast = FrequentHistogram("wait_seconds", "How long.", {"replica": "a"}, BOUNDS)
    ours.register(fast)
    slow = Histogram("wait_seconds", "How long.", ["replica"], registry=theirs, buckets=BOUNDS)

    for value in values:
        fast.observe(value)
        slow.labels("a").observe(value)
    slow.labels("a")

    assert told(ours) == told(theirs)


def told(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]
