"""If the owner of a deployment dies, another owner replaces it. This also works with a Ray cluster
that the first owner did not start.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from dist_aclgraph.actors.host import processes
from tests.actors.leftovers import wait_until
from tests.cli.test_changing_groups import WAIT_S
from tests.cli.test_deaths import OWNER
from tests.cli.test_recovery import serving
from tests.cluster.several_nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
ACTORS = "ray::Controller", "ray::Engine", "ray::Worker"


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes([{}, {"resources": {"NPU": 2}}])
    yield made
    made.end()


def ours(nodes: Nodes) -> dict[int, str]:
    """Return the process names of our actors, by process id."""
    found = {pid: processes.name_of(pid) for pid in nodes.actors}
    return {pid: name for pid, name in found.items() if name.startswith(ACTORS)}


def test_another_owner_takes_the_only_npus_and_no_request_is_lost(nodes: Nodes) -> None:
    joined = {"RAY_ADDRESS": nodes.address, "RAY_AUTH_MODE": "token"}
    with serving("recovery.restarts_per_hour=1", "device.kind=emulated", **joined) as service:
        wanted = [stream.text for stream in service.ask_all(600)]
        before = ours(nodes)

        def strike() -> None:
            [pid] = service.pids(OWNER)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: service.status("/ready") == 503, "it is ready", WAIT_S)

        streams = service.ask_all(600, strike)

        assert [stream.error for stream in streams if stream.error] == []
        assert [stream.text for stream in streams] == wanted
        service.wait_until_ready()
        now = ours(nodes)
        assert len(now) == 4
        assert sorted(now.values()) == sorted(before.values())
        assert not now.keys() & before.keys()

        service.process.send_signal(signal.SIGTERM)

        assert service.process.wait(WAIT_S) == 0
        wait_until(lambda: not ours(nodes), "an actor is left", WAIT_S)
