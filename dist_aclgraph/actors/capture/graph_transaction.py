"""Changes a lockstep group's graphs: one graph at a time, on all ranks or on no rank.

The order of the actions is: prepare, vote, capture, vote, commit. Each action has a deadline. A
rank's vote after the capture contains a digest of the recorded operators. If the digests differ,
the graph is refused, because ranks with different graphs would hang in the first replay. A capture
that fails on one rank is undone on all ranks. Then every rank checks that its memory pool is not
larger than before the capture. If the device reports its number of free streams, every rank also
checks that this number is the same as before the capture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dist_aclgraph.errors import CaptureError, RankDisagreementError, WorkerError
from dist_aclgraph.planning.commands import GraphAction, GraphAnswer
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import CaptureCost, CaptureFailure, GraphPlan


class GraphRanks(Protocol):
    """All ranks of one lockstep group, and the calls that change the ranks' graphs."""

    @property
    def ranks(self) -> Sequence[int]:
        """The world ranks of the group."""
        ...

    def carry_out(
        self,
        action: GraphAction,
        timeout_s: float,
        graph: BatchDescriptor | None = None,
        plan: GraphPlan | None = None,
    ) -> list[GraphAnswer]:
        """Let every rank do ``action``; return the answers in the order of ``ranks``.

        Raises:
            WorkerError: a rank is lost or did not answer in time; the error names the rank.
        """


@dataclass(frozen=True)
class GraphTransaction:
    """Changes the graphs of one group.

    Attributes:
        vote_s: time limit in seconds of the short actions: adopt, commit, release.
        work_s: time limit in seconds of the long actions: prepare and capture.
    """

    ranks: GraphRanks
    vote_s: float
    work_s: float

    def adopt(self, plan: GraphPlan) -> None:
        """Let every rank store ``plan``, and compare the hashes that the ranks return.

        Raises:
            RankDisagreementError: a rank has a different plan.
        """
        answers = self._demand("adopt", plan=plan)
        for rank, answer in zip(self.ranks.ranks, answers, strict=True):
            if answer.plan_hash != plan.hash:
                raise RankDisagreementError(
                    f"holds plan {answer.plan_hash[:12]} instead of {plan.hash[:12]} "
                    f"(version {plan.version})",
                    rank,
                    "NEGOTIATING",
                )

    def capture(self, graph: BatchDescriptor) -> list[CaptureCost] | CaptureFailure:
        """Capture one graph on all ranks, and return each rank's cost. If a rank fails, undo the
        capture on all ranks, and return the failure.

        Raises:
            RankDisagreementError: the ranks recorded different operators; the capture was undone.
            CaptureError: the capture was undone, but a rank did not get back all streams and bytes
                of the graph.
            WorkerError: a rank could not commit the graph, or could not undo the capture.
        """
        before = self.ranks.carry_out("prepare", self.work_s, graph)
        if (failure := self._first_failure(graph, before)) is not None:
            return failure
        captured = self.ranks.carry_out("capture", self.work_s, graph)
        if (failure := self._first_failure(graph, captured)) is not None:
            self._undo(graph, before)
            return failure
        digests = [answer.cost.digest for answer in captured]
        if len(set(digests)) > 1:
            self._undo(graph, before)
            raise self._disagreement(graph, digests)
        self._demand("commit", graph)
        return [answer.cost for answer in captured]

    def release(self, graphs: Iterable[BatchDescriptor]) -> None:
        """Release ``graphs`` on all ranks, and free their streams.

        Raises:
            WorkerError: a rank could not free these streams.
        """
        for graph in sorted(graphs):
            self._demand("release", graph)

    def _demand(
        self,
        action: GraphAction,
        graph: BatchDescriptor | None = None,
        plan: GraphPlan | None = None,
    ) -> list[GraphAnswer]:
        """Let every rank do an action that needs no resources. If a rank fails, raise
        WorkerError.
        """
        answers = self.ranks.carry_out(action, self.vote_s, graph, plan)
        for rank, answer in zip(self.ranks.ranks, answers, strict=True):
            if answer.failure is not None:
                what = graph if plan is None else f"plan {plan.version}"
                raise WorkerError(f"{action} of {what}: {answer.message}", rank, "CAPTURING")
        return answers

    def _first_failure(
        self, graph: BatchDescriptor, answers: list[GraphAnswer]
    ) -> CaptureFailure | None:
        for rank, answer in zip(self.ranks.ranks, answers, strict=True):
            if answer.failure is not None:
                return CaptureFailure(graph, rank, answer.failure, answer.message)
        return None

    def _undo(self, graph: BatchDescriptor, before: list[GraphAnswer]) -> None:
        after = self._demand("release", graph)
        for rank, then, now in zip(self.ranks.ranks, before, after, strict=True):
            streams = (then.free_streams or 0) - (now.free_streams or 0)
            held = now.live_bytes - then.live_bytes
            if streams > 0 or held > 0:
                raise CaptureError(
                    f"rank {rank} did not get back {max(0, streams)} streams and {max(0, held)} "
                    f"bytes after the capture of {graph} was undone; restart the deployment"
                )

    def _disagreement(self, graph: BatchDescriptor, digests: list[str]) -> RankDisagreementError:
        usual, _ = Counter(digests).most_common(1)[0]
        other = next(i for i, digest in enumerate(digests) if digest != usual)
        return RankDisagreementError(
            f"captured other operators for {graph} than the ranks beside it (digest "
            f"{digests[other][:12]}, theirs {usual[:12]}); its replay would hang; compare "
            "versions and settings of the nodes",
            self.ranks.ranks[other],
            "CAPTURING",
        )
