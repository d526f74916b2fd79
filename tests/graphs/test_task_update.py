"""Which lengths a captured task is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dist_aclgraph.graphs import task_update
from dist_aclgraph.graphs.task_update import UpdatableTask
from dist_aclgraph.steps.padding import Lens


@pytest.mark.parametrize("is_fused", [False, True])
def test_lengths_are_sent_where_either_kind_has_changed(
    monkeypatch: pytest.MonkeyPatch, is_fused: bool
) -> None:
    for name in ("begin_task_update", "end_task_update"):
        monkeypatch.setattr(task_update.npu, name, lambda *_: None)
    sent: list[dict[str, Any]] = []
    records: list[Any] = []

    def send(*_: Any, **given: Any) -> None:
        sent.append(dict(given))
        if is_fused:
            records.append("fused")

    operator: Any = SimpleNamespace(
        query_ends="queries", kv_lens="keys", overload=send, fused_update=send if is_fused else None
    )
    event = SimpleNamespace(record=records.append)
    task = UpdatableTask(operator, {"queries": [1, 4], "keys": [8, 8]}, None, event)

    for query_ends, kv_lens in (([1, 4], [8, 8]), ([2, 4], [8, 8]), ([2, 4], [9, 8])):
        task.open("stream", Lens(query_ends, (kv_lens,)))

    assert sent == [{"queries": [2, 4], "keys": [8, 8]}, {"queries": [2, 4], "keys": [9, 8]}]
    assert records == ["stream", *[("fused" if is_fused else "stream")] * 2]


def test_a_refused_update_ends_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(task_update.npu, "end_task_update", ended.append)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("refused")

    operator: Any = SimpleNamespace(query_ends="queries", kv_lens="keys", fused_update=refuse)
    task = UpdatableTask(operator, {"queries": [1], "keys": [8]}, None, None)

    with pytest.raises(RuntimeError, match="refused"):
        task.open("stream", Lens([1], ([9],)))

    assert ended == ["stream"]
