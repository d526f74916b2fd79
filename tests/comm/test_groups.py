"""A group of ranks can replace its communicator by the communicator of another group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dist_aclgraph.comm.groups import CommGroup


def test_a_group_that_becomes_another_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommGroup, "backend", property(lambda group: group.handle))
    old, new = (
        CommGroup((0, 1), 0, SimpleNamespace(get_hccl_comm_name=lambda rank, name=name: name))
        for name in ("old", "new")
    )
    assert old.hccl_name == "old"

    old.become(new)

    assert old.hccl_name == "new"
