"""A captured task is updated only if its lengths have changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dist_aclgraph.graphs import task_update
from dist_aclgraph.graphs.task_update import UpdatableTask
from dist_aclgraph.steps.padding import Lens


@pytest.mark.parametrize("is_at_once", [False, True])
def test_lengths_are_sent_where_either_kind_has_changed(
    monkeypatch: pytest.MonkeyPatch, is_at_once: bool
) -> None:
    for name in ("begin_task_update", "end_task_update"):
        monkeypatch.setattr(task_update.npu, name, lambda *_: None)
    sent: list[dict[str, Any]] = []
    records: list[Any] = []

    def send(*_: Any, **given: Any) -> None:
        sent.append(dict(given))
        if is_at_once:
            records.append("at once")

    operator: Any = SimpleNamespace(
        query_ends="queries",
        kv_lens="keys",
        overload=send,
        update_at_once=send if is_at_once else None,
    )
    event = SimpleNamespace(record=records.append)
    task = UpdatableTask(operator, {"queries": [1, 4], "keys": [8, 8]}, None, event)

    for query_ends, kv_lens in (([1, 4], [8, 8]), ([2, 4], [8, 8]), ([2, 4], [9, 8])):
        task.open("stream", Lens(query_ends, (kv_lens,)))

    assert sent == [{"queries": [2, 4], "keys": [8, 8]}, {"queries": [2, 4], "keys": [9, 8]}]
    assert records == ["stream", *[("at once" if is_at_once else "stream")] * 2]


@pytest.mark.parametrize("is_at_once", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_failed_update_is_ended_and_its_own_error_is_raised(
    monkeypatch: pytest.MonkeyPatch, is_at_once: bool, is_open: bool
) -> None:
    ended: list[Any] = []

    def end(stream: Any) -> None:
        ended.append(stream)
        if not is_open:
            raise RuntimeError("no task update is open")

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("the device has stopped")

    monkeypatch.setattr(task_update.npu, "begin_task_update", lambda *_: None)
    monkeypatch.setattr(task_update.npu, "end_task_update", end)
    operator: Any = SimpleNamespace(
        query_ends="queries",
        kv_lens="keys",
        overload=refuse,
        update_at_once=refuse if is_at_once else None,
    )
    task = UpdatableTask(operator, {"queries": [1], "keys": [8]}, None, None)

    with pytest.raises(RuntimeError, match="the device has stopped"):
        task.open("stream", Lens([1], ([9],)))

    assert ended == ["stream"]
