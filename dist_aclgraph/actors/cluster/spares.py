"""Reserves NPUs for groups that lose their NPUs, e.g. when a node dies."""

from __future__ import annotations

from ray.util.placement_group import PlacementGroup

from dist_aclgraph.actors.cluster import placement
from dist_aclgraph.actors.cluster.placement import BundleRequest
from dist_aclgraph.errors import PlacementError


class Spares:
    """Owns the spares. A spare is a placement group in which no worker runs.

    After ``give`` has released a placement group, ``refill`` requests another placement group. Ray
    places the requested group when NPUs are free, e.g. after a node has returned.

    Args:
        deployment: name of the deployment; names of the placement groups begin with it.
        count: number of lockstep groups for which NPUs are reserved.
    """

    def __init__(self, deployment: str, count: int) -> None:
        self._name = f"{deployment}/spare"
        self._count = count
        self._held: list[PlacementGroup] = []

    def hold(self, request: BundleRequest, num_groups: int, timeout_s: float) -> None:
        """Reserve all spares, and wait until Ray has placed them. The controller calls this method
        before it places the groups of the deployment.

        Args:
            request: the resources that one group requests.
            num_groups: number of groups at the start of the deployment.

        Raises:
            PlacementError: the cluster has not enough NPUs.
        """
        if not self._count:
            return
        nodes, count = placement.cluster_nodes(), num_groups + self._count
        if not placement.has_places(request, nodes, count):
            raise PlacementError(
                f"recovery.spares is {self._count}: {num_groups} groups and the spare ones need "
                f"{count * request.size} NPUs; the Ray cluster has "
                f"{placement.count_npus(request, nodes)}; add nodes, or lower it"
            )
        for _ in range(self._count):
            self._held.append(placement.reserve(request, timeout_s, self._name))

    def give(self) -> bool:
        """Release one spare, so that a new lockstep group can use its NPUs. Return False if none is
        reserved.
        """
        for group in self._held:
            if placement.is_placed(group):
                self._held.remove(group)
                placement.release(group)
                return True
        return False

    def refill(self, request: BundleRequest) -> None:
        """Request a new spare for each spare that was released."""
        while len(self._held) < self._count:
            self._held.append(placement.ask_for(request, self._name))

    def release(self) -> None:
        while self._held:
            placement.release(self._held.pop())
