"""LateDecisions: computes how long the engine may wait before it decides the next step (ADR 36).

While step n runs, the engine decides step n + 1, and the workers queue step n + 1 on the devices. A
request that arrives after this decision starts in step n + 2. So the engine decides late, but early
enough to keep the devices busy. A worker queues the beginning of step n + 1, and then waits for the
result of step n. The decision could have come later by the duration of this wait
(``StepResult.waited_us``).
"""

from __future__ import annotations

from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.step import StepPlan

# For each kind of step, a spare time is stored: how long the next decision could have waited while
# earlier steps of this kind ran. The next delay is the spare time minus a reserve. The reserve is
# the fraction SPARE_PART of the spare time, but at least LEAST_SPARE_S seconds.
LEAST_SPARE_S, SPARE_PART = 0.001, 0.25
MAX_DELAY_S = 0.05
# A measured spare time that is shorter than the stored time replaces the stored time at once. A
# longer measured time increases the stored time by only this fraction of the difference. So the
# fastest steps determine the delay.
GROWTH = 0.03
# eager steps of about the same size count as one kind
SIZES_PER_DOUBLING = 4

Kind = BatchDescriptor | tuple[int, int]


class LateDecisions:
    """Stores the spare time of each kind of step: how long the decision of the next step could have
    waited while a step of this kind ran.
    """

    def __init__(self) -> None:
        self._spare_s: dict[Kind, float] = {}

    def delay_s(self, running: StepPlan) -> float:
        """Return how many seconds the next decision may wait. The wait begins when ``running`` is
        the only step in flight.
        """
        spare_s = self._spare_s.get(_kind(running), 0.0)
        return min(MAX_DELAY_S, max(0.0, spare_s - max(LEAST_SPARE_S, SPARE_PART * spare_s)))

    def note(self, ended: StepPlan, delayed_s: float, waited_s: float) -> None:
        """Update the spare time for steps of the same kind as the finished step ``ended``. To be
        called when the next step is in flight.

        Args:
            delayed_s: how many seconds the decision of the next step waited.
            waited_s: the shortest time, in seconds, that any rank waited in the step ``ended``
                (``StepResult.waited_us``).
        """
        kind = _kind(ended)
        known_s = self._spare_s.get(kind)
        spare_s = delayed_s + waited_s
        if waited_s < LEAST_SPARE_S / 2:
            # At least one rank hardly waited. So the decision may have come too late, by an unknown
            # time.
            spare_s = delayed_s / 2
        if known_s is not None and spare_s > known_s:
            spare_s = known_s + (spare_s - known_s) * GROWTH
        self._spare_s[kind] = spare_s


def _kind(step: StepPlan) -> Kind:
    if step.graph is not None:
        return step.graph
    octave = step.largest.num_tokens.bit_length()  # ``num_tokens`` is at least 2 ** (octave - 1)
    return octave, (step.largest.num_tokens * 2 * SIZES_PER_DOUBLING) >> octave
