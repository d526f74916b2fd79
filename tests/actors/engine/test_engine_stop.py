"""An engine ends before the controller would kill it, even if a disk hangs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from dist_aclgraph.actors.engine.engine import Engine
from dist_aclgraph.config import make_config


class FakeThreads:
    """Fake threads of a file server or of fetches. They never end, because a file system hangs."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def close(self, timeout_s: float = 60.0) -> None:
        self.waited_s += timeout_s


def test_a_disk_that_hangs_does_not_hold_the_engine_beyond_its_time_to_stop() -> None:
    """An engine that waited longer would be killed before it deletes the copies in memory."""
    config, hanging = make_config({"model": "m", "timeouts": {"stop_s": 2.0}}), FakeThreads()
    engine = SimpleNamespace(
        _config=config,
        _loop=None,
        _thread=None,
        _fetches=hanging,
        _block_server=hanging,
        _directory=SimpleNamespace(remove=lambda: None),
    )
    Engine.stop(cast(Any, engine))
    assert hanging.waited_s <= config.timeouts.stop_s / 2
