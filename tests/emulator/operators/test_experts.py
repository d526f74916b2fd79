"""Layers of experts over tensor and data parallel ranks, run by scripts/expert_layer.py.

All tests of a layout share one run of the script, because the start of ranks takes most of the
time.
"""

import json
from pathlib import Path

import pytest

from dist_aclgraph.planning.budget.captured import ALL_TO_ALL, EXPERTS, GATHER, SHARED

SCRIPT = (Path(__file__).parents[1] / "scripts" / "expert_layer.py").read_text(encoding="utf-8")
LAYOUTS = [(1, 2), (2, 1), (2, 2)]  # tp, dp
KINDS = ["all_gather", "all_to_all", "mc2"]


@pytest.fixture(scope="module")
def done() -> dict:
    return {}


@pytest.fixture
def results(done, run_ranks):
    """Return a function that returns what the ranks of a layout printed. The function runs the
    script once per layout.
    """

    def of(layout, *algorithm, **settings):
        key = (*layout, *algorithm)
        if key not in done:
            tp, dp = layout
            code = f"sys.argv = {['', *map(str, key)]}\n" + SCRIPT
            done[key] = run_ranks(code, tp * dp, timeout_s=300, devices=tp * dp, **settings)
        return [parse(*result) for result in done[key]]

    return of


def parse(status: int, output: str) -> dict:
    assert status == 0, output
    return json.loads(output.partition("RESULT ")[2].partition("\n")[0])


def assert_no_problems(results, check: str) -> None:
    assert [result["problems"][check] for result in results] == [[] for _ in results]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
class TestEveryExchange:
    def test_gives_the_dense_sum(self, results, layout, kind):
        assert_no_problems(results(layout), f"sum {kind}")

    def test_the_tokens_of_each_ranks_experts_are_counted(self, results, layout, kind):
        assert_no_problems(results(layout), f"load {kind}")

    def test_replays_with_other_tokens_as_it_runs(self, results, layout, kind):
        assert_no_problems(results(layout), f"replay {kind}")

    def test_gives_the_same_with_shared_experts_on_a_side_stream(self, results, layout, kind):
        assert_no_problems(results(layout), f"overlap {kind}")

    def test_gives_nearly_the_dense_sum_in_int8_and_replays_its_bits(self, results, layout, kind):
        assert_no_problems(results(layout), f"int8 {kind}")

    def test_is_the_same_operators_on_all_ranks(self, results, layout, kind):
        assert len({result["digests"][kind] for result in results(layout)}) == 1


@pytest.mark.parametrize("check", ["sum mc2", "replay mc2", "overlap mc2", "int8 mc2"])
def test_without_a_mask_padding_travels_like_tokens(results, check):
    # Strict mode would refuse this: the hierarchy algorithm of an A2 is documented for at least 16
    # ranks.
    assert_no_problems(results((2, 2), "hierarchy", strict=False), check)


def test_lanes_have_the_entries_that_the_budget_counts(results):
    # In each of the two layers, three operators of the shared experts run on the side lane: two
    # products and the activation. ``EXPERTS`` counts the operators of both lanes. So the test adds
    # the counts of the two lanes.
    (first, *_), beside = results((2, 2)), SHARED - 2
    for kind, more in [("all_gather", GATHER), ("all_to_all", ALL_TO_ALL)]:
        main, *others = first["lanes"][kind]
        assert main / 2 + beside == EXPERTS + more
        assert [lane / 2 for lane in others if lane] == [beside]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_without_room_are_counted_and_the_others_complete(results, layout):
    assert_no_problems(results(layout), "overflow")
