"""The number of operators and collectives of attention over sharded caches; see
scripts/context_layer.py.

All tests of a layout share one run of the script, because the start of ranks takes most of the
time.
"""

import json
from pathlib import Path

import pytest

from dist_aclgraph.planning.budget.captured import REMAPPED, SHARDED, in_sharded_attention
from dist_aclgraph.planning.budget.workload import Workload

SCRIPT = (Path(__file__).parents[1] / "scripts" / "context_layer.py").read_text(encoding="utf-8")
LAYOUTS = [(2, 1, 2), (1, 2, 2), (2, 2, 4)]  # tp, pcp, dcp


@pytest.fixture(scope="module")
def done() -> dict:
    return {}


@pytest.fixture
def layers(done, run_ranks):
    """Return the counts of a layout's first rank: with a sharded cache, and with a cache that is
    not sharded.
    """

    def of(layout):
        if layout not in done:
            tp, pcp, dcp = layout
            code = f"sys.argv = ['', '{tp}', '{pcp}', '{dcp}']\n" + SCRIPT
            done[layout] = run_ranks(code, tp * pcp, devices=tp * pcp)
        found = [parse(*result) for result in done[layout]]
        assert all(counts == found[0] for counts in found)
        sharded = [counts for counts in found[0] if counts["is_sharded"]]
        return sharded, [counts for counts in found[0] if not counts["is_sharded"]]

    return of


def parse(status: int, output: str) -> list:
    assert status == 0, output
    return json.loads(output.partition("RESULT ")[2].partition("\n")[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_meet_as_often_as_the_budget_counts(layers, layout):
    tp, pcp, dcp = layout
    sharded, whole = layers(layout)

    counted = in_sharded_attention(Workload(num_layers=1, tp=tp, pcp=pcp, dcp=dcp))

    assert {counts["collectives"] for counts in sharded} == {counted}
    assert {counts["collectives"] for counts in whole} == {0}


@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_main_lane_holds_at_most_what_the_budget_counts(layers, is_sparse):
    more = [
        counts["operators"] - alone["operators"]
        for layout in LAYOUTS
        for counts, alone in zip(*layers(layout), strict=True)
        if is_sparse == (counts["kind"] == "sparse")
    ]

    assert max(more) == SHARDED + REMAPPED * is_sparse


@pytest.mark.parametrize("layout", LAYOUTS)
def test_merging_few_rows_takes_no_slow_operator(layers, layout):
    sharded, _ = layers(layout)

    assert {(counts["unaligned"], counts["ai_cpu"]) for counts in sharded} == {(0, 0)}
