"""The interface through which an ingress or an LLM object uses a deployment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dist_aclgraph.actors.client.outage import Outlook
from dist_aclgraph.actors.wire.addresses import Reach
from dist_aclgraph.config import Config


class Deployment(Protocol):
    """A running deployment."""

    node_id: str  # Ray's id of this process's node

    def reach(self) -> Reach:
        """Return the addresses at which clients reach the deployment. Raise EngineDeadError if the
        deployment does not serve.
        """
        ...

    def report(self) -> dict[str, Any]: ...

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError if the deployment does not serve and will not serve again."""
        ...

    def outlook(self) -> Outlook:
        """Return the deployment's status, for clients that know no serving group."""
        ...

    def restarts_left(self) -> int:
        """Return how many lost controllers may still be replaced within this hour. Thread-safe."""
        ...

    def shut_down(self) -> None:
        """Stop all processes of the deployment."""
        ...


StartDeployment = Callable[[Config], Deployment]
