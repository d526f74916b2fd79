"""If requests share prefixes, routing by cached prefixes finds more cached tokens than routing by
numbers of requests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.simulate.load_options import LoadOptions
from dist_aclgraph.simulate.routing import BY_CACHE, BY_COUNT
from dist_aclgraph.simulate.simulation import simulate
from dist_aclgraph.simulate.times import StepTimes
from tests.unit.simulate.deployments import make

TIMES = StepTimes(base_s=0.01, token_s=0.0005, capture_s=0.0)


def four_groups(checkpoint: Path) -> Config:
    """Return a configuration of four groups; each group has a cache of 64 blocks of 16 tokens."""
    return make(checkpoint, parallel={"dp": 4})


def options(**fields: int) -> LoadOptions:
    given = {"beginnings": 24, "beginning_tokens": 128, "requests": 300, **fields}
    return LoadOptions(poisson=40.0, prompt_tokens=12, output_tokens=12, **given)


def rows(config: Config, load: LoadOptions) -> dict[str, dict]:
    return {row["name"]: row for row in simulate(config, load, TIMES)["routing"]}


def test_shared_beginnings_are_found_in_caches_more_often_than_by_counting_requests(
    checkpoint: Path,
) -> None:
    """All shared beginnings together need 192 blocks. These blocks fit in the caches of three
    groups, but not in the cache of one group.
    """
    found = rows(four_groups(checkpoint), options())

    ours, other = found[BY_CACHE], found[BY_COUNT]
    assert ours["cached_share"] > other["cached_share"] + 0.15
    assert ours["first_token_s"]["mean"] < other["first_token_s"]["mean"]
    # An equal share is a quarter of the requests; each group gets at least a third of this share.
    counts = [group["requests"] for group in ours["groups"]]
    assert sum(counts) == 300 and min(counts) > 300 / 4 / 3


def test_one_beginning_is_spread_where_one_group_cannot_serve_all(checkpoint: Path) -> None:
    found = rows(four_groups(checkpoint), options(beginnings=1, requests=200))

    counts = [group["requests"] for group in found[BY_CACHE]["groups"]]
    assert min(counts) > 0
    assert found[BY_CACHE]["first_token_s"]["p99"] < 2 * found[BY_COUNT]["first_token_s"]["p99"]


def test_equal_seeds_are_routed_equally(checkpoint: Path) -> None:
    load = options(requests=60)

    assert rows(four_groups(checkpoint), load) == rows(four_groups(checkpoint), load)


def test_without_shared_beginnings_or_other_groups_nothing_is_routed(checkpoint: Path) -> None:
    one = simulate(make(checkpoint), options(requests=10), TIMES)
    none = simulate(four_groups(checkpoint), options(beginnings=0, requests=10), TIMES)

    assert one["routing"] is none["routing"] is None


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (options(beginning_tokens=5000), "at most"),
        (options(beginnings=-1), "beginnings is -1"),
        (LoadOptions(trace=Path("x"), beginnings=2), "poisson"),
    ],
)
def test_beginnings_that_cannot_be_are_refused(
    checkpoint: Path, load: LoadOptions, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(four_groups(checkpoint), load, TIMES)
