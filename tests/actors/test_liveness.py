"""Who counts as silent: a peer that gives no sign, and not one that nobody listened to."""

from __future__ import annotations

import pytest

from dist_aclgraph.actors.host.liveness import SharedHeartbeat, Silence, beat_s

LIMIT_S = 20.0
BEAT_S = beat_s(LIMIT_S)


@pytest.fixture
def heartbeat() -> SharedHeartbeat:
    return SharedHeartbeat(LIMIT_S)


def is_silent_after(heartbeat: SharedHeartbeat, seconds: float) -> bool:
    """Listen for so long; return whether the process counted as silent by then."""
    turns = int(seconds / BEAT_S)
    return any(heartbeat.listen(BEAT_S) for _ in range(turns))


def test_a_peer_is_silent_once_the_limit_is_passed() -> None:
    silence = Silence(LIMIT_S)
    turns = int(LIMIT_S / BEAT_S)

    assert [silence.listen(BEAT_S) for _ in range(turns + 1)] == [False] * turns + [True]
    silence.heard()
    assert not silence.listen(BEAT_S)


def test_a_listener_that_was_stopped_blames_nobody_for_it() -> None:
    silence = Silence(LIMIT_S)

    assert not silence.listen(100 * LIMIT_S)
    assert silence.silent_s == 2 * BEAT_S


def test_a_process_that_beats_is_not_silent(heartbeat: SharedHeartbeat) -> None:
    for _ in range(300):  # more than the byte has values
        heartbeat.beat()
        assert not is_silent_after(heartbeat, LIMIT_S / 2)


def test_a_process_that_stops_beating_is_silent(heartbeat: SharedHeartbeat) -> None:
    heartbeat.beat()

    assert is_silent_after(heartbeat, 2 * LIMIT_S)


def test_the_first_sign_of_a_process_is_expected_from_the_fork_on(
    heartbeat: SharedHeartbeat,
) -> None:
    heartbeat.begin()

    assert is_silent_after(heartbeat, 2 * LIMIT_S)
    assert not heartbeat.has_served
    heartbeat.begin()
    assert not is_silent_after(heartbeat, LIMIT_S / 2)


def test_a_process_at_rest_is_expected_to_give_no_sign(heartbeat: SharedHeartbeat) -> None:
    heartbeat.beat()
    heartbeat.rest()

    assert not is_silent_after(heartbeat, 3 * LIMIT_S)
    assert heartbeat.has_served


def test_signs_of_a_start_do_not_say_that_the_process_serves(heartbeat: SharedHeartbeat) -> None:
    with heartbeat.starting():
        assert not heartbeat.has_served
