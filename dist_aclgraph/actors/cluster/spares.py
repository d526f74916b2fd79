"""Places that are kept free for groups that lose their places, as when a node dies."""

from __future__ import annotations

from ray.util.placement_group import PlacementGroup

from dist_aclgraph.actors.cluster import placement
from dist_aclgraph.actors.cluster.placement import BundleRequest
from dist_aclgraph.errors import PlacementError


class Spares:
    """Owns empty placement groups. A released one is requested again: Ray places it once there is
    room, as when a node comes back.

    Args:
        deployment: its name; names of the placement groups begin with it.
        count: how many lockstep groups there are places for.
    """

    def __init__(self, deployment: str, count: int) -> None:
        self._name = f"{deployment}/spare"
        self._count = count
        self._held: list[PlacementGroup] = []

    def hold(self, request: BundleRequest, num_groups: int, timeout_s: float) -> None:
        """Wait until all places are held, before the deployment's groups take theirs.

        Args:
            request: of each of the groups.
            num_groups: that the deployment starts with.

        Raises:
            PlacementError: the cluster has not so many.
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
        """Release one place for the next placement; return whether there was one."""
        for group in self._held:
            if placement.is_placed(group):
                self._held.remove(group)
                placement.release(group)
                return True
        return False

    def refill(self, request: BundleRequest) -> None:
        """Ask for as many places again as were given."""
        while len(self._held) < self._count:
            self._held.append(placement.ask_for(request, self._name))

    def release(self) -> None:
        """Give all places back."""
        while self._held:
            placement.release(self._held.pop())
