"""A deployment reserves spare NPUs. They replace NPUs that groups lose."""

from __future__ import annotations

import pytest

from dist_aclgraph.actors.cluster.placement import BundleRequest
from dist_aclgraph.actors.cluster.spares import Spares
from dist_aclgraph.errors import PlacementError

NOWHERE = BundleRequest({"NPU": 1.0}, 1, 1, "STRICT_PACK", {"rack": "nowhere"})


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_spares_that_no_node_can_hold_are_refused_without_a_wait() -> None:
    spares = Spares("controller-of-spares", 1)

    with pytest.raises(
        PlacementError, match=r"recovery.spares is 1: 1 groups.*need 2 NPUs; .*on no node"
    ):
        spares.hold(NOWHERE, 1, timeout_s=5.0)
