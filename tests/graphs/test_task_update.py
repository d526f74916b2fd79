"""Which lengths a captured task is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dist_aclgraph.graphs import task_update
from dist_aclgraph.graphs.task_update import UpdatableTask
from dist_aclgraph.steps.padding import Lens


def test_lengths_are_sent_where_either_kind_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("begin_task_update", "end_task_update"):
        monkeypatch.setattr(task_update.npu, name, lambda *_: None)
    sent: list[dict[str, Any]] = []
    operator: Any = SimpleNamespace(
        query_ends="queries", kv_lens="keys", overload=lambda **given: sent.append(dict(given))
    )
    task = UpdatableTask(operator, {"queries": [1, 4], "keys": [8, 8]}, None, None)

    for query_ends, kv_lens in (([1, 4], [8, 8]), ([2, 4], [8, 8]), ([2, 4], [9, 8])):
        task.patch(None, Lens(query_ends, (kv_lens,)))

    assert sent == [{"queries": [2, 4], "keys": [8, 8]}, {"queries": [2, 4], "keys": [9, 8]}]
