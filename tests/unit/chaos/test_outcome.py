"""The outcome of a run with faults, as computed from the responses that clients got."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tools.chaos.answers import Answer, longest_pause
from tools.chaos.outcome import Outcome, Sight, judge
from tools.chaos.plan import Fault, Kind, Strike
from tools.chaos.report import COLUMNS, TOTAL, lines_of, sentence_of

STRIKE = Strike(1, Fault(Kind.KILL_WORKER), 10, 0)
WANTED = Answer(0, "abc", 200, False, "length", 3)
times = st.lists(st.floats(0, 100, allow_nan=False), max_size=30)


def make_outcome(*answers: Answer, **changes: Any) -> Outcome:
    facts: dict[str, Any] = {
        "struck_s": 10.0,
        "num_groups": 2,
        "recovered_s": 15.0,
        "exit_code": None,
        "left": [],
        "said": "",
    }
    sights = changes.pop("sights", [Sight(9.0, 0), Sight(10.0, 2), Sight(10.5, 1), Sight(15.0, 2)])
    return judge(STRIKE, answers, [WANTED], sights, **{**facts, **changes})


def test_the_answers_of_a_run_without_faults_are_good() -> None:
    outcome = make_outcome(replace(WANTED, times_s=[9.0, 9.9, 12.0, 12.1]), WANTED)

    assert outcome.is_good
    assert (outcome.tried, outcome.lost, outcome.different, outcome.refused) == (2, 0, 0, 0)
    assert outcome.unready_s == 0.5
    assert outcome.recovered_s == 5.0
    assert outcome.new_tokens_s == 2.0
    assert abs((outcome.pause_s or 0.0) - 2.1) < 1e-9


def test_an_answer_that_ends_early_or_with_an_error_is_lost() -> None:
    cut = Answer(0, "ab", 200)
    told = Answer(0, "", 200, error="rank 1 in SERVING: the process died")
    silent = Answer(0)

    outcome = make_outcome(cut, told, silent, WANTED)

    assert (outcome.tried, outcome.lost, outcome.different) == (4, 3, 0)
    assert outcome.error == "HTTP 200, not to the end"
    assert not outcome.is_good


def test_a_service_that_ends_is_not_good() -> None:
    whole = make_outcome(WANTED)

    assert whole.is_good
    assert not replace(whole, different=1).is_good
    assert not replace(whole, exit_code=1).is_good


def test_refused_and_abandoned_requests_do_not_count_as_lost() -> None:
    refused = Answer(0, "", 503, True, error="try again later")
    gone = Answer(0, "a", 200, given_up=True)

    outcome = make_outcome(refused, gone)

    assert (outcome.lost, outcome.refused, outcome.different) == (0, 1, 0)


def test_a_refusal_that_does_not_say_when_to_come_again_is_a_loss() -> None:
    assert make_outcome(Answer(0, "", 503)).lost == 1


def test_other_tokens_are_seen_in_whole_answers_and_in_beginnings() -> None:
    others = [
        replace(WANTED, text="abd"),
        replace(WANTED, num_tokens=4),
        replace(WANTED, finish_reason="stop"),
        Answer(0, "b", 200, given_up=True),
    ]

    assert make_outcome(*others).different == len(others)


def test_a_leftover_or_the_end_of_the_service_is_a_bad_outcome() -> None:
    assert not make_outcome(WANTED, left=["its port"]).is_good
    assert not make_outcome(WANTED, exit_code=1).is_good


def test_where_no_group_was_missed_nothing_is_said_of_a_recovery() -> None:
    outcome = make_outcome(WANTED, sights=[Sight(9.0, 1), Sight(11.0, 2)])

    assert outcome.unready_s is outcome.new_tokens_s is outcome.recovered_s is None


def test_the_last_stream_says_when_tokens_came_again() -> None:
    streams = [replace(WANTED, times_s=list(times)) for times in (
        (9.0, 10.4, 10.6, 14.0),  # the pause at the end has nothing to do with the fault
        (9.0, 10.1, 12.5, 12.6),
        (9.0, 10.2, 12.0),
        (9.0, 9.5),  # ended before the fault
        (11.0, 11.1),  # began after the fault
    )]  # fmt: skip

    assert make_outcome(*streams).new_tokens_s == 2.5


@given(times, st.floats(0, 100, allow_nan=False))
def test_the_longest_pause_lies_between_two_deltas_and_no_other_is_longer(
    times_s: list[float], struck_s: float
) -> None:
    pause = longest_pause(times_s, struck_s)

    inside = sorted(times_s)
    later = [t for t in inside if t > struck_s]
    if pause is None:
        assert not later or len(inside) < 2 or later == inside[:1]
        return
    assert pause.end_s > struck_s
    assert {pause.begin_s, pause.end_s} <= set(inside)
    assert not any(pause.begin_s < t < pause.end_s for t in inside)
    before = [t for t in inside if t <= struck_s][-1:]
    waits = [*before, *later]
    gaps = [b - a for a, b in pairwise(waits)]
    assert pause.length_s == max(gaps)


def test_the_table_has_a_line_for_each_fault_and_one_for_all() -> None:
    worst = replace(make_outcome(WANTED), unready_s=2.5, left=("its port",))
    other = Strike(2, Fault(Kind.KILL_ENGINE), 10, 0)
    ended = replace(make_outcome(Answer(0)), strike=other, exit_code=1, unready_s=None)

    lines = list(lines_of([make_outcome(WANTED), ended, worst]))

    assert all(len(line) == len(COLUMNS) for line in lines)
    assert [line[:4] for line in lines] == [
        ["worker killed", "2", "2", "0"],
        ["engine killed", "1", "1", "1"],
        [TOTAL, "3", "3", "1"],
    ]
    named = [dict(zip(COLUMNS, line, strict=True)) for line in lines]
    assert [line["not ready, s"] for line in named] == ["2.5", "-", "2.5"]
    assert [line["ended"] for line in named] == ["0", "1", "1"]
    assert [line["left behind"] for line in named] == ["its port", "nothing", "its port"]


def test_a_strike_is_told_in_one_line() -> None:
    lost = Answer(0, error="it died")

    told = sentence_of(make_outcome(lost, exit_code=1, left=["its port"], said="end"))

    assert told.startswith("1: worker killed, after 10 deltas: 1 of 1 requests lost; not ready 0.5")
    assert "the service ended with 1; left behind: its port" in told
    assert told.endswith("told: it died; the service said: end")
    assert "\n" not in told
