"""The scheduler's decisions are delayed by the right time. A simple model replaces the device and
its host.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.actors.engine.late_decisions import MAX_DELAY_S, LateDecisions
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.step import StepPlan, StepSize
from tests.laws import examples

DECODE = BatchDescriptor(mode="FULL", num_tokens=8, num_reqs=8, query_len=1)


def plan(graph: BatchDescriptor | None = DECODE, num_tokens: int = 8) -> StepPlan:
    return StepPlan(1, 0, 0, graph, (), largest=StepSize(num_tokens, num_tokens))


def run(late: LateDecisions, device_s: float, host_s: float, step: StepPlan | None = None) -> float:
    """Run one step; return the seconds that its device had to wait for the next step.

    Args:
        device_s: duration of the step on the device.
        host_s: time from a decision until the workers have queued the next step on the device.
    """
    step = step or plan()
    delay_s = late.delay_s(step)
    ready_s = delay_s + host_s
    late.note(step, delay_s, max(0.0, device_s - ready_s))
    return max(0.0, ready_s - device_s)


def test_most_of_the_time_to_spare_is_used() -> None:
    late = LateDecisions()
    waits = [run(late, device_s=0.014, host_s=0.002) for _ in range(300)]
    assert max(waits) == 0
    assert 0.75 * 0.012 * 0.99 < late.delay_s(plan()) <= 0.75 * 0.012


def test_without_time_to_spare_steps_are_decided_at_once() -> None:
    late = LateDecisions()
    for _ in range(50):
        run(late, device_s=0.003, host_s=0.005)
    assert late.delay_s(plan()) == 0


@given(
    device_s=st.lists(st.floats(0.0005, 0.2), min_size=1, max_size=60),
    host_s=st.floats(0.0, 0.02),
)
@examples(100)
def test_a_device_never_waits_long_in_a_row(device_s: list[float], host_s: float) -> None:
    """If a decision was late, the next delay is at most half of the delay of the late decision."""
    late = LateDecisions()
    for seconds in device_s:
        before_s = late.delay_s(plan())
        assert 0 <= before_s <= MAX_DELAY_S
        run(late, seconds, host_s)
        if before_s + host_s > seconds:
            assert late.delay_s(plan()) <= before_s / 2


@given(
    device_s=st.lists(st.floats(0.009, 0.02), min_size=1, max_size=100),
    host_s=st.floats(0.0, 0.001),
)
@examples(100)
def test_steps_whose_times_vary_by_a_tenth_never_wait(device_s: list[float], host_s: float) -> None:
    late = LateDecisions()
    least_s = min(device_s)
    for seconds in device_s:
        assert run(late, min(seconds, 1.2 * least_s), host_s) == 0


def test_each_kind_of_step_has_its_own_delay() -> None:
    late = LateDecisions()
    long, short = plan(None, 4096), plan(None, 64)
    run(late, 0.04, 0.001, long)
    assert late.delay_s(long) > late.delay_s(short) == late.delay_s(plan()) == 0
    assert late.delay_s(plan(None, 4000)) == 0
    assert late.delay_s(plan(None, 4097)) == late.delay_s(long)
