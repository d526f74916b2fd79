"""``make bench-overload`` computes the right figures from artificial replies."""

import pytest

from tools.chaos.overload import BUSY, OK, TOKENS, Reply, gaps, goodput


def make_reply(start_s: float, gap_s: float = 0.1, count: int = TOKENS, **words: object) -> Reply:
    times = [start_s + index * gap_s for index in range(count)]
    return Reply(0.0, OK, start_s, deltas_s=times, **words)


def test_only_answers_that_came_whole_count_as_good():
    whole = [make_reply(start_s, is_whole=True) for start_s in (0.0, 10.0)]
    cut, refused = make_reply(0.0, count=50), Reply(0.0, BUSY, 0.1, says_when=True)
    assert goodput([*whole, cut, refused]) == pytest.approx(
        2 * TOKENS / (10.0 + 0.1 * (TOKENS - 1))
    )
    assert goodput([cut, refused]) == 0.0


def test_gaps_are_between_tokens_of_one_answer():
    found = gaps([make_reply(0.0, 0.1), make_reply(5.0, 0.2), Reply(0.0)])
    assert found["max"] == pytest.approx(0.2)
    assert found["p50"] == pytest.approx(0.15, abs=0.051)
    assert gaps([Reply(0.0)]) == {"p50": 0.0, "p99": 0.0, "max": 0.0}
