"""LateDecisions: tells how long the engine may wait before it decides the next step (ADR 36).

While step n runs, the engine decides step n + 1, and the workers queue this step behind step n. A
request that arrives after the decision begins in step n + 2. So the engine decides as late as the
devices allow. Each worker measures how long it had to wait for step n after the device had enough
of step n + 1 (``StepResult.waited_us``). The decision could have come later by this time.
"""

from __future__ import annotations

from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.step import StepPlan

# The workers should have at least this time to spare, and at least this part of the known time.
LEAST_SPARE_S, SPARE_PART = 0.001, 0.25
MAX_DELAY_S = 0.05
# A shorter time is used at once. A longer time is approached slowly, so that steps that take less
# time than others of their kind determine the delay.
GROWTH = 0.03
SIZES_PER_DOUBLING = 8  # steps without a graph are of one kind if they have about as many tokens

Kind = BatchDescriptor | tuple[int, int]


class LateDecisions:
    """The time that the decision of the next step may wait, for each kind of the running step."""

    def __init__(self) -> None:
        self._spare_s: dict[Kind, float] = {}

    def delay_s(self, running: StepPlan) -> float:
        """Return how long the next decision may wait, from the time when ``running`` was the only
        step in flight.
        """
        spare_s = self._spare_s.get(_kind(running), 0.0)
        return min(MAX_DELAY_S, max(0.0, spare_s - max(LEAST_SPARE_S, SPARE_PART * spare_s)))

    def note(self, ended: StepPlan, delayed_s: float, waited_s: float) -> None:
        """Learn from a step that has ended while the next step is in flight.

        Args:
            delayed_s: how long the decision of the next step waited.
            waited_s: ``StepResult.waited_us`` of ``ended`` in seconds, the minimum of all ranks.
        """
        kind = _kind(ended)
        known_s = self._spare_s.get(kind)
        spare_s = delayed_s + waited_s
        if waited_s < LEAST_SPARE_S / 2:
            spare_s = delayed_s / 2  # the decision came too late, by an unknown time
        if known_s is not None and spare_s > known_s:
            spare_s = known_s + (spare_s - known_s) * GROWTH
        self._spare_s[kind] = spare_s


def _kind(step: StepPlan) -> Kind:
    if step.graph is not None:
        return step.graph
    octave = step.largest.num_tokens.bit_length()
    return octave, (step.largest.num_tokens * SIZES_PER_DOUBLING) >> octave
