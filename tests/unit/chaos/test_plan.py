"""The same seed always gives the same plan of faults."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tools.chaos.plan import FIRSTS, GROUP_ENDING, IN_RECOVERY, Fault, Kind, make_plan

kinds = st.lists(st.sampled_from(FIRSTS), min_size=1, unique=True)
seeds = st.integers(0, 1 << 30)


@given(seeds, st.integers(0, 80), st.integers(1, 500), kinds)
def test_the_same_seed_makes_the_same_plan(
    seed: int, count: int, max_deltas: int, kinds: list[Kind]
) -> None:
    plan = make_plan(seed, count, max_deltas=max_deltas, kinds=kinds)

    assert plan == make_plan(seed, count, max_deltas=max_deltas, kinds=kinds)
    assert [strike.number for strike in plan] == list(range(1, count + 1))
    assert all(1 <= strike.after_deltas <= max_deltas for strike in plan)


@given(seeds, kinds)
def test_a_round_tries_each_fault_alone_and_each_second_one_within_a_recovery(
    seed: int, kinds: list[Kind]
) -> None:
    ending = set(kinds) & set(GROUP_ENDING)
    size = len(kinds) + (len(IN_RECOVERY) if ending else 0)

    plan = make_plan(seed, 2 * size, max_deltas=100, kinds=kinds)

    for strikes in (plan[:size], plan[size:]):
        faults = [strike.fault for strike in strikes]
        assert {fault.kind for fault in faults if fault.second is None} == set(kinds)
        pairs = [fault for fault in faults if fault.second is not None]
        assert {fault.second for fault in pairs} == (set(IN_RECOVERY) if ending else set())
        assert {fault.kind for fault in pairs} <= ending


def test_other_seeds_make_other_plans() -> None:
    plans = [make_plan(seed, 20, max_deltas=100) for seed in range(20)]

    assert len({tuple(plan) for plan in plans}) == len(plans)


def test_a_longer_plan_begins_as_a_short_one_does() -> None:
    assert make_plan(3, 50, max_deltas=100)[:7] == make_plan(3, 7, max_deltas=100)


def test_a_plan_without_faults_is_empty() -> None:
    assert make_plan(1, 10, max_deltas=100, kinds=()) == []


def test_the_text_of_a_fault_names_the_second_fault() -> None:
    fault = Fault(Kind.KILL_ENGINE, Kind.KILL_WORKER)

    assert str(Fault(Kind.KILL_ENGINE)) == "engine killed"
    assert str(fault) == "engine killed; worker killed"
