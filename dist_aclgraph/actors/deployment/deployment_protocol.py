"""A deployment, as an ingress or an LLM object uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dist_aclgraph.actors.client.outage import Outlook
from dist_aclgraph.actors.wire.addresses import Reach
from dist_aclgraph.config import Config


class Deployment(Protocol):
    """A running deployment."""

    node_id: str  # where this process is, as Ray calls it

    def reach(self) -> Reach:
        """Say where the deployment is reached now; raise EngineDeadError if it does not serve."""
        ...

    def report(self) -> dict[str, Any]:
        """Return plan, buckets with their counters, eager steps by reason, ranks and memory."""
        ...

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError if the deployment does not serve, and will not."""
        ...

    def outlook(self) -> Outlook:
        """Say what becomes of the deployment, for clients that know no group that serves."""
        ...

    def shut_down(self) -> None:
        """Stop all processes of the deployment."""
        ...


StartDeployment = Callable[[Config], Deployment]
