"""Attention operators inside a captured graph. For each replay, the lengths of these operators are
patched.

A capture records each attention operator as a task group. Before the operator, the capture inserts
a wait for an external event and the reset of this event. A patch issues the operator again into the
task group, with a step's lengths, on the update stream. Then the event is recorded, so that the
graph continues. Lengths are sent either

- *after* the replay is queued: patch and record layer by layer, while the device runs; or
- *ahead* of the replay: while the host waits for the device, the host sends guessed lengths for the
  next step. A task is *open* if it is patched and its event is recorded before its replay is
  queued. Open tasks are always the first tasks of the graph: if other work arrives, the host stops
  between two layers, and patches the remaining tasks after the replay is queued.

Rules for the order of work on the device:

1. A task is patched only after the last replay has read the old lengths. The task's event is
  recorded only after the last replay has reset the event. An earlier recording would be undone by
  the reset, and the device would wait for ever. So the update stream waits for the end of the last
  replay before it opens the first task for the next replay.
2. An open task lets the graph continue. If the step has other lengths, open tasks are closed: the
  update stream waits for the recorded events and resets them, as a replay would do. The main stream
  waits for these resets before the replay. All tasks are patched after the replay is queued.
3. Steps that replay other graphs, and eager steps, do not change open tasks. Tasks stay open until
  their own graph is replayed. Before this replay, open tasks are closed if their lengths differ
  from the lengths of the step.
4. A graph is released only while the device is idle. At that time, all updates that were sent ahead
  have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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
        arguments: arguments of the operator. The arguments include the lengths that were sent to
            the task last. Device tensors among the arguments are weak references, so that later
            operators of the graph can reuse the tensors' memory.
        ahead: index of the drafting iteration in which the operator runs. The operator uses the KV
            lengths of this iteration.
    """

    operator: AttentionOperator
    arguments: Arguments
    handle: Any
    event: Any
    ahead: int = 0

    def open(self, stream: Any, lens: Lens) -> None:
        """Send the lengths ``lens`` if the task does not have them already, and record the task's
        event, so that the replay continues after it.

        ``stream`` must be current.
        """
        operator, arguments = self.operator, self.arguments
        query_ends, kv_lens = lens.query_ends, lens.kv_lens[self.ahead]
        if arguments[operator.kv_lens] == kv_lens and arguments[operator.query_ends] == query_ends:
            self.event.record(stream)
            return
        arguments[operator.query_ends] = query_ends
        arguments[operator.kv_lens] = kv_lens
        try:
            self._update(stream)
        except RuntimeError:
            # If the operator has raised the error, the task update is still open and must be ended.
            # If another call has raised the error, no update is open, and ``end_task_update``
            # raises a second error. This second error is ignored, because only the first error
            # names the cause, e.g. a stopped device.
            with suppress(RuntimeError):
                npu.end_task_update(stream)
            raise

    def _update(self, stream: Any) -> None:
        """Issue the operator into the task group, and record the event after the operator."""
        if self.operator.update_at_once is not None:
            self.operator.update_at_once(stream, self.handle, self.event, **self.arguments)
            return
        npu.begin_task_update(stream, self.handle)
        self.operator.overload(**self.arguments)
        npu.end_task_update(stream)
        self.event.record(stream)

    def forget(self, stream: Any) -> None:
        """Drop the lengths that were sent to the task last, and reset the task's event on
        ``stream``.
        """
        for name in (self.operator.kv_lens, self.operator.query_ends):
            # No step has lengths of -1, so the next step will send its own lengths.
            self.arguments[name] = [-1] * len(self.arguments[name])
        npu.clear_event(self.event, stream)


class TaskRecorder:
    """Collects the updatable tasks of one graph during its capture.

    Owns the operators' workspace. All tasks of the graph share the workspace, because tasks run one
    after another.
    """

    def __init__(self, stream: Any, events: EventPool) -> None:
        self._stream = stream
        self._events = events
        self._workspace: Tensor | None = None
        self.tasks: list[UpdatableTask] = []

    def ahead(self, by: int) -> AttentionTasks:
        """Return an object that records the operators of the drafting iteration with the index
        ``by``.
        """
        return _TasksAhead(self, by)

    @property
    def num_rows(self) -> int:
        """Return the number of KV lengths that each task needs; 0 if there are no tasks."""
        if not self.tasks:
            return 0
        task = self.tasks[0]
        return len(task.arguments[task.operator.kv_lens])

    def run(
        self,
        operator: AttentionOperator,
        outputs: list[Tensor],
        arguments: Arguments,
        ahead: int = 0,
    ) -> None:
        """Capture a wait for a new event, then the operator as a task group."""
        if self._workspace is None:
            # An update cannot enlarge the workspace, so the workspace is allocated for the largest
            # lengths.
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
        """Reset the events before the first replay. Earlier graphs used the same events and may
        have recorded them.
        """
        for task in self.tasks:
            npu.clear_event(task.event, self._stream)
        self._stream.synchronize()

    def forget_workspace(self) -> None:
        """Drop the workspace at the end of the capture, so that other graphs may use its memory."""
        self._workspace = None


@dataclass(frozen=True)
class _TasksAhead:
    recorder: TaskRecorder
    by: int

    def run(self, operator: AttentionOperator, outputs: list[Tensor], arguments: Arguments) -> None:
        self.recorder.run(operator, outputs, arguments, self.by)


class TaskUpdates:
    """Synchronizes the tasks of one graph with its replays, as the module's docstring explains."""

    def __init__(self, tasks: list[UpdatableTask]) -> None:
        self._tasks = tasks
        self._num_open = 0
        self._open_lens: Lens | None = None
        self._replayed: Any = npu.runtime().Event()
        self._closed: Any = npu.runtime().Event()

    def before_replay(self, main_stream: Any, update_stream: Any, lens: Lens) -> None:
        """If the lengths that were sent ahead differ from the replay's lengths ``lens``, reset the
        events of the tasks that have the wrong lengths.
        """
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
        between: Callable[[], None] = lambda: None,
    ) -> int:
        """Send the lengths to all tasks of the queued replay that did not get them ahead of the
        replay, and record the events of these tasks. Return the number of these tasks.

        The host does not wait for the device.

        Args:
            between: called after each task.
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
        """Call this after an abort of the device, which has also dropped updates and replays. After
        this call, no task has lengths. The graph's events are reset on ``main_stream``.
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
        """Send guessed lengths of the next replay to one task after another, and record the tasks'
        events. Stop when all tasks have lengths, or when the host has other work.

        If the host had other work, a later call with the same lengths continues with the next task.
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
                task.open(update_stream, lens)
                self._num_open += 1
                if is_stopped():
                    return
