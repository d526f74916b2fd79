"""Attention operators inside a captured graph, and patching their host lists at each replay.

Capture puts, before each attention operator, a wait for an external event and its reset, and makes
the operator a task group. At replay the update stream re-issues the operator with the step's
lengths into the group and records the event; the graph goes on from there. Order on the device:
the update stream first waits for the main stream, so that a record for step n + 1 cannot overtake
the reset of step n (an event recorded before its reset is lost, and the device waits for ever).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dist_aclgraph.device import npu
from dist_aclgraph.graph.padding import Lens


@dataclass(frozen=True)
class UpdatableTask:
    """One captured attention operator.

    Attributes:
        arguments: keyword arguments of ``operation``; device tensors by weak reference, so that
            the graph's pool may reuse their memory inside the graph.
    """

    operation: Callable[..., Any]
    arguments: dict[str, Any]
    handle: Any
    event: Any


class TaskRecorder:
    """Collects the updatable tasks of one graph while it is captured.

    Owns the workspace that all tasks of the graph share: they run one after another.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._workspace: Tensor | None = None
        self.tasks: list[UpdatableTask] = []

    def run(self, operation: Callable[..., Any], out: Tensor, arguments: dict[str, Any]) -> None:
        """Capture ``operation.out`` as a task group behind an event of its own."""
        if self._workspace is None:
            # The largest that any lengths can ask for: an update must never need more.
            sizing = torch.ops.npu._npu_fused_infer_attention_score_get_max_workspace
            self._workspace = sizing(**arguments)
        overload = operation.out  # type: ignore[attr-defined]
        softmax_lse = torch.empty(1, dtype=torch.float32, device=out.device)
        outputs = {"workspace": self._workspace, "out": [out, softmax_lse]}
        event = npu.external_event()
        event.wait(self._stream)
        event.reset(self._stream)
        npu.begin_task_group(self._stream)
        overload(**arguments, **outputs)
        handle = npu.end_task_group(self._stream)
        weak = {key: npu.weak_reference(value) for key, value in (arguments | outputs).items()}
        self.tasks.append(UpdatableTask(overload, weak, handle, event))

    def forget_workspace(self) -> None:
        """After the capture: the pool may give the workspace's memory to other graphs."""
        self._workspace = None


def update_tasks(tasks: list[UpdatableTask], stream: Any, lens: Lens | None) -> None:
    """Patch every task with the step's lengths and let the graph pass it, in layer order.

    Call with ``stream`` as the current stream. None means that nothing changed since the last
    replay: the tasks keep their parameters, only their events are recorded.
    """
    if lens is None:
        for task in tasks:
            task.event.record(stream)
        return
    query_ends, kv_lens = lens
    for task in tasks:
        arguments = task.arguments
        arguments["actual_seq_lengths"] = query_ends
        arguments["actual_seq_lengths_kv"] = kv_lens
        npu.begin_task_update(stream, task.handle)
        task.operation(**arguments)
        npu.end_task_update(stream)
        task.event.record(stream)
