"""A group may resume only a limited number of times in a row, but any number of times in total."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from dist_aclgraph.actors.engine.resumption import Comeback, Resumption
from dist_aclgraph.errors import DeviceFaultError
from dist_aclgraph.planning.way_back import SOUND_STEPS, TRIES
from dist_aclgraph.topology import WorldRank

LINK = DeviceFaultError("a link is gone", 1, "SERVING", "link")


@pytest.fixture
def resumption() -> Resumption:
    """Return the resumption of a group whose devices can always be stopped, and whose ranks always
    resume.
    """
    channel = Mock()
    channel.receive_resumed.return_value = {}
    return Resumption(channel, (WorldRank(0), WorldRank(1)), lambda timeout_s, check: {}, 60.0)


def come_back(resumption: Resumption, epoch: int, num_steps: int) -> None:
    """Let the group fail, and resume it in ``epoch``. Then run ``num_steps`` steps."""
    assert resumption.run(LINK, epoch, lambda: None) == Comeback(epoch + 1, keeps_kv=True)
    for _ in range(num_steps):
        resumption.note_step()


def test_a_link_that_flaps_now_and_then_never_ends_a_group(resumption: Resumption) -> None:
    for epoch in range(5 * TRIES["link"]):
        come_back(resumption, epoch, SOUND_STEPS)

    assert resumption.counts == {"link": 5 * TRIES["link"]}


def test_steps_between_failures_are_not_added_up(resumption: Resumption) -> None:
    for epoch in range(TRIES["link"]):
        come_back(resumption, epoch, SOUND_STEPS - 1)

    with pytest.raises(DeviceFaultError, match="a link is gone"):
        resumption.run(LINK, TRIES["link"], lambda: None)
