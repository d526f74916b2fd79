"""In each phase of a start, all groups wait at the same time, so that their waiting times do not
add up.
"""

from __future__ import annotations

import threading

import pytest

from dist_aclgraph.actors.controller.startup import side_by_side

COUNT = 4


def test_all_parts_are_in_a_phase_at_once_and_answer_in_order():
    inside = threading.Barrier(COUNT, timeout=180)  # an error unless all calls wait together

    def work(index: int) -> int:
        inside.wait()
        return 10 * index

    assert side_by_side(work, range(COUNT)) == [0, 10, 20, 30]


def test_the_first_failure_is_raised_while_others_still_work():
    going_on = threading.Event()

    def work(index: int) -> None:
        if index == 2:
            raise ValueError("two")
        going_on.wait(180)

    with pytest.raises(ValueError, match="two"):
        side_by_side(work, range(COUNT))
    going_on.set()
