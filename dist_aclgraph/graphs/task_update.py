"""Attention operators inside a captured graph, and patching their host lists for each replay.

Capture puts, before each attention operator, a wait for an external event and its reset, and makes
the operator a task group. A patch re-issues the operator with a step's lengths into the group, on
the update stream; the event recorded behind the patch lets the graph continue. Lengths reach a
graph

- *behind* its replay: layer by layer a patch and a record, while the device follows; or
- *ahead* of it: while the host would wait anyway, it sends the probable lengths of the next step. A
  task that is patched and recorded before its replay is queued is *open*. Open tasks are always the
  first ones: other work of the host stops the updates between two layers, and the remaining tasks
  are patched behind the replay.

Orders on the device:

1. No patch before the last replay has read the old lengths, and no record before it has reset the
  event: otherwise the record is lost, and the device waits for ever. So the update stream waits for
  the end of the last replay before it opens the first task for the next one.
2. An open task lets the graph continue. If the step wants other lengths, the update stream awaits
  and resets the open events, as a replay would have done, and the main stream waits for this before
  the replay. Then all tasks are patched behind the replay.
3. Steps of other graphs and eager steps change nothing: tasks stay open until their own graph is
  replayed; then their lengths fit, or they are closed.
4. A graph is released only while the device is idle: updates that were sent ahead have run by then,
  or end with the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dist_aclgraph.device import npu
from dist_aclgraph.graphs.recording import EventPool
from dist_aclgraph.layers.attention import Arguments, AttentionOperator, AttentionTasks
from dist_aclgraph.steps.padding import Lens


@dataclass(frozen=True)
class UpdatableTask:
    """One captured attention operator.

    Attributes:
        arguments: arguments of the operator, with the latest sent lengths. Device tensors are weak
            references, so that the graph's pool may reuse their memory inside the graph.
        ahead: its iteration of drafting, which determines its KV lengths.
    """

    operator: AttentionOperator
    arguments: Arguments
    handle: Any
    event: Any
    ahead: int = 0

    def patch(self, stream: Any, lens: Lens) -> None:
        """Send lengths, unless the task already has them. ``stream`` must be current."""
        operator, arguments = self.operator, self.arguments
        query_ends, kv_lens = lens.query_ends, lens.kv_lens[self.ahead]
        if arguments[operator.kv_lens] == kv_lens and arguments[operator.query_ends] == query_ends:
            return
        arguments[operator.query_ends] = query_ends
        arguments[operator.kv_lens] = kv_lens
        npu.begin_task_update(stream, self.handle)
        try:
            operator.overload(**arguments)
        finally:
            npu.end_task_update(stream)

    def forget(self, stream: Any) -> None:
        """Forget the lengths of the task and the state of its event. ``stream`` resets the
        event.
        """
        for name in (self.operator.kv_lens, self.operator.query_ends):
            self.arguments[name] = [-1] * len(self.arguments[name])  # lengths that no step uses
        npu.clear_event(self.event, stream)


class TaskRecorder:
    """Collects the updatable tasks of one graph while it is captured.

    Owns the workspace that all tasks of the graph share: they run one after another.
    """

    def __init__(self, stream: Any, events: EventPool) -> None:
        self._stream = stream
        self._events = events
        self._workspace: Tensor | None = None
        self.tasks: list[UpdatableTask] = []

    def ahead(self, by: int) -> AttentionTasks:
        """Return the tasks for the operators of an iteration of drafting."""
        return _TasksAhead(self, by)

    @property
    def num_rows(self) -> int:
        """Return the lengths that each task takes."""
        task = self.tasks[0]
        return len(task.arguments[task.operator.kv_lens])

    def run(
        self,
        operator: AttentionOperator,
        outputs: list[Tensor],
        arguments: Arguments,
        ahead: int = 0,
    ) -> None:
        """Capture the operator as a task group behind its own event."""
        if self._workspace is None:
            # The largest size that any lengths can need: an update must never need more.
            self._workspace = operator.max_workspace(arguments)
        written = {"workspace": self._workspace, "out": outputs}
        event = self._events.take()
        event.wait(self._stream)
        event.reset(self._stream)
        npu.begin_task_group(self._stream)
        operator.overload(**arguments, **written)
        handle = npu.end_task_group(self._stream)
        weak = {key: npu.weak_reference(value) for key, value in (arguments | written).items()}
        self.tasks.append(UpdatableTask(operator, weak, handle, event, ahead))

    def clear_events(self) -> None:
        """Reset the events, which other graphs may have used; the first replay waits for them."""
        for task in self.tasks:
            npu.clear_event(task.event, self._stream)
        self._stream.synchronize()

    def forget_workspace(self) -> None:
        """Finish the capture: the pool may give the workspace's memory to other graphs."""
        self._workspace = None


@dataclass(frozen=True)
class _TasksAhead:
    recorder: TaskRecorder
    by: int

    def run(self, operator: AttentionOperator, outputs: list[Tensor], arguments: Arguments) -> None:
        self.recorder.run(operator, outputs, arguments, self.by)


class TaskUpdates:
    """Synchronizes the tasks of one graph with its replays; see the orders above."""

    def __init__(self, tasks: list[UpdatableTask]) -> None:
        self._tasks = tasks
        self._num_open = 0
        self._open_lens: Lens | None = None
        self._replayed: Any = npu.runtime().Event()
        self._closed: Any = npu.runtime().Event()

    def before_replay(self, main_stream: Any, update_stream: Any, lens: Lens) -> None:
        """Close tasks that are open for other lengths than the replay's."""
        if self._num_open == 0 or lens == self._open_lens:
            return
        for task in self._tasks[: self._num_open]:
            task.event.wait(update_stream)
            task.event.reset(update_stream)
        self._num_open = 0
        self._closed.record(update_stream)
        main_stream.wait_event(self._closed)

    def after_replay(
        self,
        main_stream: Any,
        update_stream: Any,
        lens: Lens,
        between: Callable[[], None],
    ) -> int:
        """Open the remaining tasks for the replay; return their number.

        Args:
            between: called behind each task.
        """
        num_behind = len(self._tasks) - self._num_open

        def go_on() -> bool:
            between()
            return False

        self._open(main_stream, update_stream, lens, go_on)
        self._num_open = 0
        self._replayed.record(main_stream)
        return num_behind

    def forget(self, main_stream: Any) -> None:
        """Reset after an abort of the device: no task is open, and the lengths of tasks are
        unknown.
        """
        for task in self._tasks:
            task.forget(main_stream)
        self._num_open = 0

    def send_ahead(
        self,
        main_stream: Any,
        update_stream: Any,
        lens: Lens,
        is_wanted_elsewhere: Callable[[], bool],
    ) -> None:
        """Open tasks for the next replay, until all are open or the host has other work.

        May be called again with the same lengths, to continue.
        """
        assert self._num_open == 0 or lens == self._open_lens
        self._open_lens = lens
        self._open(main_stream, update_stream, lens, is_wanted_elsewhere)

    def _open(
        self, main_stream: Any, update_stream: Any, lens: Lens, is_stopped: Callable[[], bool]
    ) -> None:
        if self._num_open == len(self._tasks) or is_stopped():
            return
        if self._num_open == 0:
            update_stream.wait_event(self._replayed)
        with npu.on_stream(update_stream, back=main_stream):
            for task in self._tasks[self._num_open :]:
                task.patch(update_stream, lens)
                task.event.record(update_stream)
                self._num_open += 1
                if is_stopped():
                    return
