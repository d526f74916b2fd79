from __future__ import annotations

from collections.abc import Iterator

import pytest

from dist_aclgraph.actors.host import processes
from tests.cli.supervised import Service, Start


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Service] = []

    def begin(parts: str = "") -> Service:
        started.append(Service(parts))
        return started[-1]

    yield begin
    for service in started:
        processes.kill_all(service.all())
        service.process.communicate()
