"""A peer without heartbeats counts as silent. Time during which the listener itself did not run
does not count as silence.
"""

from __future__ import annotations

import pytest

from dist_aclgraph.actors.host.liveness import SharedHeartbeat, Silence, beat_s

LIMIT_S = 20.0
BEAT_S = beat_s(LIMIT_S)


class Clock:
    """A clock that moves only before a call of ``listen``."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def is_silent_after(self, listener: Silence | SharedHeartbeat, seconds: float) -> bool:
        """Let ``listener`` listen for ``seconds``; return whether the peer counts as silent."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += BEAT_S
            if listener.listen():
                return True
        return False


clock = Clock()


@pytest.fixture
def heartbeat() -> SharedHeartbeat:
    return SharedHeartbeat(LIMIT_S, clock)


def test_a_peer_is_silent_once_the_limit_is_passed() -> None:
    silence = Silence(LIMIT_S, clock)

    assert not clock.is_silent_after(silence, LIMIT_S)
    assert clock.is_silent_after(silence, BEAT_S)
    silence.heard()
    assert not clock.is_silent_after(silence, LIMIT_S)


def test_a_listener_that_was_stopped_blames_nobody_for_it() -> None:
    silence = Silence(LIMIT_S, clock)
    clock.now_s += 100 * LIMIT_S

    assert not silence.listen()
    assert silence.silent_s == 2 * BEAT_S


def test_a_process_that_beats_is_not_silent(heartbeat: SharedHeartbeat) -> None:
    for _ in range(300):  # more than 256, the number of values of a byte
        heartbeat.beat()
        assert not clock.is_silent_after(heartbeat, LIMIT_S / 2)


def test_a_process_that_stops_beating_is_silent(heartbeat: SharedHeartbeat) -> None:
    heartbeat.beat()

    assert clock.is_silent_after(heartbeat, 2 * LIMIT_S)


def test_the_first_sign_of_a_process_is_expected_from_the_fork_on(
    heartbeat: SharedHeartbeat,
) -> None:
    heartbeat.begin()

    assert clock.is_silent_after(heartbeat, 2 * LIMIT_S)
    assert not heartbeat.has_served
    heartbeat.begin()
    assert not clock.is_silent_after(heartbeat, LIMIT_S / 2)


def test_a_process_at_rest_is_expected_to_give_no_sign(heartbeat: SharedHeartbeat) -> None:
    heartbeat.beat()
    heartbeat.rest()

    assert not clock.is_silent_after(heartbeat, 3 * LIMIT_S)
    assert heartbeat.has_served


def test_signs_of_a_start_do_not_say_that_the_process_serves(heartbeat: SharedHeartbeat) -> None:
    with heartbeat.starting():
        assert not heartbeat.has_served
