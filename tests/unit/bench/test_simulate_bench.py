"""The bench that compares a deployment with its simulation: its requests and its verdict."""

import pytest

from benchmarks.simulate import CASES, draw, missed

REAL = {"replays": 100, "eager steps": 4, "padded tokens": 30, "seconds": 2.0}
PLAIN, SHARED, DRAFTS = CASES


@pytest.mark.parametrize(
    ("case", "changes", "names"),
    [
        (PLAIN, {}, []),
        (PLAIN, {"seconds": 2.29}, []),
        (PLAIN, {"seconds": 1.69, "eager steps": 5}, ["eager steps", "seconds"]),
        (SHARED, {"replays": 101, "padded tokens": 29}, ["replays", "padded tokens"]),
        (DRAFTS, {"replays": 110, "eager steps": 5, "padded tokens": 34}, []),
        (DRAFTS, {"replays": 120, "padded tokens": 60}, ["replays", "padded tokens"]),
    ],
)
def test_steps_must_be_equal_and_seconds_close(case, changes, names):
    assert missed(case, REAL, REAL | changes) == names


def test_others_come_during_the_first_step_and_share_contexts():
    first, *others = draw(4, 1, SHARED.shared_tokens)

    # this prompt needs more than one step
    assert first.arrival_s == 0 and first.prompt_tokens > 512
    assert all(other.arrival_s > 0 for other in others)
    assert [other.shared for other in others] == [0, 1, 0, 1]
    assert {other.shared_tokens for other in others} == {SHARED.shared_tokens}
