"""Changes the graphs of a serving group: one graph at a time, between two steps.

There are two kinds of changes. A plan change captures the new graphs of a new plan version one by
one, when no request is about to start. Then the plan change releases the graphs that the new plan
does not contain. A lazy change captures one graph when the traffic needs this graph; the graph is
called a lazy graph. Steps replay only graphs that exist on every rank. A failed capture is undone
on all ranks. A lazy graph may take the streams of an older graph. If this lazy graph cannot be
captured, the older graph is captured again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dist_aclgraph.actors.capture.graph_transaction import GraphTransaction
from dist_aclgraph.actors.capture.lockstep_capture import cost_of
from dist_aclgraph.actors.wire.step_channel import StepSender
from dist_aclgraph.planning.commands import GraphAction, GraphAnswer, GraphCommand
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.planning.lazy import LazyGraphs
from dist_aclgraph.planning.plan import CaptureCost, CaptureFailure, GraphPlan
from dist_aclgraph.planning.rebucketing import Action, Release
from dist_aclgraph.topology import WorldRank

# Minimum number of steps between two captures. So no token waits for more than one capture.
STEPS_BETWEEN = 16
MAX_FAILURES = 100  # maximum number of messages in ``failures``; each failed capture adds a message
PATIENCE_STEPS = 200  # after this many steps, a change is due even if requests are about to start


@dataclass
class ChannelRanks:
    """The ranks of a serving group; commands reach the ranks over the group's step channel.

    Attributes:
        epoch: a function that returns the group's current epoch.
        pool_bytes: size in bytes of the memory pool that all graphs of a rank share; the largest
            size on any rank.
    """

    channel: StepSender
    ranks: tuple[WorldRank, ...]
    epoch: Callable[[], int]
    raise_if_dead: Callable[[], None]
    pool_bytes: int
    _num_commands: int = 0

    def carry_out(
        self,
        action: GraphAction,
        timeout_s: float,
        graph: BatchDescriptor | None = None,
        plan: GraphPlan | None = None,
    ) -> list[GraphAnswer]:
        """Let every rank do one action between two steps.

        Raises:
            WorkerLostError: a rank did not answer in time.
        """
        self._num_commands += 1
        command = GraphCommand(self.epoch(), self._num_commands, action, graph, plan)
        self.channel.send(command)
        answers = self.channel.receive_votes(command, timeout_s, self.raise_if_dead)
        self.pool_bytes = max(answer.pool_bytes for answer in answers)
        return answers


@dataclass
class GraphChanges:
    """Owns the changes that were requested, but are not complete yet.

    Attributes:
        costs: for each existing graph, its highest cost on any rank.
        failures: messages about the latest captures that were undone.
    """

    dispatcher: GraphDispatcher
    transaction: GraphTransaction
    costs: dict[BatchDescriptor, CaptureCost]
    failures: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_FAILURES))
    _wanted: tuple[GraphPlan, Sequence[Action]] | None = None  # other threads set it
    _coming: GraphPlan | None = None
    _todo: deque[Action] = field(default_factory=deque)
    _last_step: int = -STEPS_BETWEEN

    # ---- any thread

    def change_plan(self, plan: GraphPlan, actions: Sequence[Action]) -> None:
        """Begin the change to ``plan``. Later calls of ``advance`` carry out ``actions``."""
        self._wanted = (plan, actions)

    @property
    def is_changing(self) -> bool:
        return self._wanted is not None or self._coming is not None

    # ---- the loop's thread

    def is_due(self, is_idle: bool, is_quiet: bool) -> bool:
        """Return whether the next step should wait for a change.

        Args:
            is_idle: whether the group has no request. A change in an idle group delays no client.
            is_quiet: whether no request is about to start.
        """
        lazy = self.dispatcher.lazy
        if not self.is_changing and (lazy is None or not lazy.has_change):
            return False
        since = self.dispatcher.step - self._last_step
        return is_idle or since >= (STEPS_BETWEEN if is_quiet else PATIENCE_STEPS)

    def advance(self) -> None:
        """Capture at most one new graph.

        If a lazy graph replaces an older graph and cannot be captured, the older graph is captured
        again.

        Raises:
            WorkerError: a rank is lost, or the ranks recorded different operators.
        """
        if self._coming is None and self._wanted is not None:
            self._coming, self._todo = self._wanted[0], deque(self._wanted[1])
            self._wanted = None
        if self._coming is not None:
            self._go_on(self._coming)
        elif self.dispatcher.lazy is not None:
            self._change_lazily(self.dispatcher.lazy)

    def _go_on(self, plan: GraphPlan) -> None:
        while self._todo:
            action = self._todo.popleft()
            if isinstance(action, Release):
                self._release(action.graph)
            else:
                failure = self._capture(action.graph)
                if failure is not None:
                    self._coming = plan.without(failure)
                return
        self.transaction.adopt(plan)
        self.dispatcher.adopt(plan)
        self._coming = None

    def _change_lazily(self, lazy: LazyGraphs) -> None:
        change = lazy.next_change()
        if change is None:
            return
        victim = change.victim
        if victim is not None:
            # The reserved streams suffice for a fixed number of graphs. So the old graph is
            # released before the new graph is captured.
            self._release(victim)
        is_captured = self._capture(change.graph) is None
        if is_captured:
            lazy.enter(change.graph)
        else:
            lazy.fail(change.graph, self.dispatcher.step)
        if victim is not None and (is_captured or self._capture(victim) is not None):
            lazy.leave(victim)

    def _capture(self, graph: BatchDescriptor) -> CaptureFailure | None:
        if graph in self.dispatcher.graphs:  # ``graph`` already exists as a lazy graph
            return None
        self._last_step = self.dispatcher.step
        outcome = self.transaction.capture(graph)
        if isinstance(outcome, CaptureFailure):
            self.failures.append(outcome.undone)
            return outcome
        self.costs[graph] = cost_of(graph, outcome)
        self.dispatcher.add(graph)
        return None

    def _release(self, graph: BatchDescriptor) -> None:
        self.dispatcher.remove(graph)
        self.costs.pop(graph, None)
        self.transaction.release([graph])
