"""The history contains rates, quantiles and loads for each period of the last ten minutes."""

from __future__ import annotations

import logging
import math
import threading

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from dist_aclgraph.serve.observe.history import (
    PERIOD_S,
    SPAN_S,
    History,
    MetricCounts,
    quantile,
    read_counts,
)
from dist_aclgraph.serve.observe.metrics import PREFIX

INF = math.inf


def make_counts(time_s, *, tokens=0.0, engines=("0",), experts=None, ttft=()):
    return MetricCounts(
        time_s,
        {
            "generation_tokens": dict.fromkeys(engines, tokens),
            "num_requests_running": dict.fromkeys(engines, 2.0),
            "kv_cache_usage": {name: 0.25 * (i + 1) for i, name in enumerate(engines)},
        },
        {} if experts is None else {"0": experts},
        {"time_to_first_token_seconds": tuple(ttft)},
    )


def series_of(*counts, now_s=None):
    history = History()
    for each in counts:
        history.add(each)
    return history.report(counts[-1].time_s if now_s is None else now_s)


def test_a_rate_is_the_growth_over_all_groups_divided_by_the_time_between_samples():
    report = series_of(
        make_counts(10, tokens=100, engines=("0", "1")),
        make_counts(14, tokens=300, engines=("0", "1")),
    )

    assert report["series"]["generation_tokens_per_s"] == [100.0]
    assert report["series"]["running"] == [4.0]
    assert report["series"]["kv_cache_usage"] == [0.5]  # the largest usage among all engines
    assert report["ages_s"] == [0.0]


def test_ended_and_refused_requests_are_counted_over_all_reasons():
    def looked(stop, length, full):
        ended = CounterMetricFamily(PREFIX + "request_success", "", labels=("finished_reason",))
        refused = CounterMetricFamily(PREFIX + "refused_requests", "", labels=("status",))
        for reason, count in (("stop", stop), ("length", length)):
            if count:
                ended.add_metric((reason,), count)
        if full:
            refused.add_metric(("503",), full)
        return [ended, refused]

    report = series_of(
        read_counts(looked(0, 0, 0), 0),
        read_counts(looked(10, 0, 5), 5),
        read_counts(looked(20, 5, 5), 10),
    )

    assert report["series"]["requests_per_s"] == [2.0, 3.0]
    assert report["series"]["refused_per_s"] == [1.0, 0.0]


def test_a_group_that_is_new_counts_from_its_second_look_on():
    report = series_of(
        make_counts(0, tokens=0),
        make_counts(5, tokens=1000, engines=("0", "1")),
        make_counts(10, tokens=1500, engines=("0", "1")),
    )

    assert report["series"]["generation_tokens_per_s"] == [200.0, 200.0]


def test_without_answers_a_point_has_no_values_and_the_next_ones_do():
    report = series_of(
        make_counts(0, tokens=0),
        MetricCounts(5, {}, {}, {}),
        make_counts(10, tokens=50),
        make_counts(15, tokens=100),
    )

    assert report["series"]["generation_tokens_per_s"] == [None, None, 10.0]


def test_a_quantile_counts_only_observations_between_two_samples():
    before = [(0.1, 1000.0), (0.2, 1000.0), (INF, 1000.0)]
    after = [(0.1, 1000.0), (0.2, 1010.0), (INF, 1010.0)]

    report = series_of(make_counts(0, ttft=before), make_counts(5, ttft=after))

    assert report["series"]["time_to_first_token_s_p50"] == [pytest.approx(0.15)]
    assert report["series"]["inter_token_latency_s_p50"] == [None]


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.25, 0.5), (0.5, 1.0), (0.625, 3.0), (1.0, 4.0)],
)
def test_a_quantile_lies_evenly_within_its_bucket_and_not_above_the_last_bound(share, expected):
    assert quantile(share, ((1.0, 2.0), (2.0, 2.0), (4.0, 3.0), (INF, 4.0))) == expected


def test_nothing_observed_has_no_quantile():
    assert quantile(0.5, ((1.0, 0.0), (INF, 0.0))) is None
    assert quantile(0.5, ()) is None


def test_loads_of_experts_are_percent_of_the_mean_of_their_group():
    looks = [
        make_counts(5 * i, experts={"0": 300.0 * min(i, 4), "1": 100.0 * min(i, 4)})
        for i in range(9)
    ]

    assert series_of(*looks)["experts"] == {"0": {"0": [150, None], "1": [50, None]}}


def test_ten_minutes_are_kept_and_no_more():
    history = History()
    for i in range(500):
        history.add(make_counts(PERIOD_S * i, experts={"0": float(i)}))

    report = history.report(PERIOD_S * 499)

    lengths = {len(values) for values in report["series"].values()}
    assert lengths == {SPAN_S / PERIOD_S} == {len(report["ages_s"])}
    assert report["ages_s"][0] == SPAN_S - PERIOD_S
    assert len(report["experts"]["0"]["0"]) == 30


class Client:
    """A client of engines. The client is closed after ``num_looks`` samples of the history."""

    def __init__(self, num_looks: int) -> None:
        self.num_left = num_looks
        self.is_closed = threading.Event()

    def wait_for_end(self, timeout_s: float) -> bool:
        self.num_left -= 1
        if not self.num_left:
            self.is_closed.set()
        return self.is_closed.is_set()


def test_metrics_that_cannot_be_collected_cost_their_points_alone_and_are_logged_once(caplog):
    history, client = History(), Client(num_looks=6)
    fails = iter([False, True, True, False, True, False])

    def collect():
        if next(fails):
            raise RuntimeError("no metrics")
        running = GaugeMetricFamily(f"{PREFIX}num_requests_running", "", labels=["engine"])
        running.add_metric(["0"], 3)
        return [running]

    history.watch(collect, client)
    assert client.is_closed.wait(180)

    assert history.report(0.0)["series"]["running"] == [3, 3]
    failed = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(failed) == 2, "once for each time that it begins to fail"
    assert all(record.exc_info for record in failed)
