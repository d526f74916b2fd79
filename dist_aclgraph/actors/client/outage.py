"""An outage is a period in which no group accepts requests. During an outage, the requests of a
client wait.

Engines do not respond during an outage, so the client asks the controller about the deployment.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dist_aclgraph.actors.client.token_log import OpenRequest
from dist_aclgraph.actors.wire.messages import GroupList
from dist_aclgraph.config import Config
from dist_aclgraph.errors import DistAclGraphError

ASK_S = 0.2  # seconds between the controller's response and the client's next question
NO_GROUPS = GroupList(0, ())

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outlook:
    """The controller's answer about its deployment.

    Attributes:
        failure: why the deployment's service has ended for good; "" if a group may accept requests
            later.
        progress: progress of the next group's start, e.g. ``LOADING 3 of 9``.
        token: connection token of the deployment; "" if the token is unchanged.
        node_id: the id of the client's node in this deployment's Ray; "" if the id is unchanged.
    """

    groups: GroupList = NO_GROUPS
    failure: str = ""
    progress: str = ""
    token: str = ""
    node_id: str = ""


AskOutlook = Callable[[], Outlook]


@dataclass(frozen=True)
class Recovery:
    """How a client waits for a group.

    Attributes:
        ask: a function that returns an outlook, possibly after a long time. If the function raises
            an error, all waiting requests fail.
        wait_s: how long a request waits for a group, in seconds, before it fails.
    """

    ask: AskOutlook
    wait_s: float

    @classmethod
    def from_config(cls, config: Config, ask: AskOutlook) -> Recovery | None:
        """Return the configured ``Recovery``; None if ``recovery.restarts_per_hour`` is 0."""
        recovery = config.recovery
        return cls(ask, recovery.wait_s) if recovery.restarts_per_hour else None


class Outage:
    """Owns the waiting requests, the controller's last outlook, and the time without service.

    The client's lock guards this object. All times are from one monotonic clock.

    Args:
        recovery: how requests wait for a group. If None, requests do not wait, but fail.
    """

    def __init__(self, recovery: Recovery | None) -> None:
        self._recovery = recovery
        # The keys are request ids. The values are the request, and the time when its wait ends.
        self._requests: dict[str, tuple[OpenRequest, float]] = {}
        self._began_s: float | None = None
        self._past_s = 0.0
        self.outlook = Outlook()
        self.outlook_poller = None if recovery is None else OutlookPoller(recovery.ask)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def has_recovery(self) -> bool:
        """Whether lost groups are replaced."""
        return self._recovery is not None

    def deadline_s(self, now_s: float) -> float:
        """Return the time until which a request may wait if it begins to wait now."""
        return math.inf if self._recovery is None else now_s + self._recovery.wait_s

    @property
    def may_end(self) -> bool:
        """Whether a group may accept requests later, so that the outage can end."""
        return self._recovery is not None and not self.outlook.failure

    def see(self, now_s: float, *, is_served: bool) -> None:
        """Record whether a group accepts requests now."""
        if is_served == (self._began_s is None):
            return
        if self._began_s is None:
            self._began_s = now_s
        else:
            self._past_s += now_s - self._began_s
            self._began_s = None
            self.outlook = Outlook()
        if self.outlook_poller is not None:
            self.outlook_poller.ask(is_wanted=not is_served)

    def seconds(self, now_s: float) -> float:
        """Return the total time during which no group accepted requests."""
        return self._past_s + (0.0 if self._began_s is None else now_s - self._began_s)

    def hold(self, request: OpenRequest, now_s: float) -> bool:
        """Add a request to the waiting requests, and return True. If no group will accept requests
        again, add nothing, and return False.
        """
        if not self.may_end:
            return False
        self._requests[request.request_id] = request, self.deadline_s(now_s)
        return True

    def forget(self, request_id: str) -> None:
        """Remove a request if it is waiting."""
        self._requests.pop(request_id, None)

    def take_all(self) -> list[OpenRequest]:
        """Remove and return all waiting requests. Requests with more output tokens come first. If
        two requests have the same number of output tokens, the request that waits longer comes
        first.
        """
        requests = [request for request, _ in self._requests.values()]
        self._requests.clear()
        return sorted(requests, key=lambda request: -request.num_output_tokens)

    def take_overdue(self, now_s: float) -> list[OpenRequest]:
        """Remove and return the requests that have waited too long."""
        overdue = [request for request, until_s in self._requests.values() if until_s <= now_s]
        for request in overdue:
            del self._requests[request.request_id]
        return overdue

    def overdue_reason(self) -> str:
        assert self._recovery is not None
        progress = f" ({self.outlook.progress})" if self.outlook.progress else ""
        return (
            f"no group has come up within recovery.wait_s = {self._recovery.wait_s:g} s"
            f"{progress}; try again later"
        )


class OutlookPoller:
    """Owns a thread that asks the controller for its outlook again and again during an outage."""

    def __init__(self, ask: AskOutlook) -> None:
        self._ask = ask
        self._answer: Outlook | None = None
        self._wanted = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlooks", daemon=True)
        self._thread.start()

    def ask(self, *, is_wanted: bool) -> None:
        if is_wanted:
            self._answer = None
            self._wanted.set()
        else:
            self._wanted.clear()

    def take_answer(self) -> Outlook | None:
        """Return the controller's last outlook; None if an earlier call has already returned that
        outlook.
        """
        answer, self._answer = self._answer, None
        return answer

    def close(self) -> None:
        """Send no more questions. Does not wait for the response to the last question."""
        self._closing.set()
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._closing.is_set():
                return
            try:
                self._answer = self._ask()
            except DistAclGraphError as e:
                self._answer = Outlook(failure=str(e))
            except Exception as e:  # this thread must not end, or requests would wait forever
                logger.exception("asking for the deployment's outlook failed")
                self._answer = Outlook(failure=f"{type(e).__name__}: {e}")
            self._closing.wait(ASK_S)
