"""The NPUs of a deployment are freed after its owner and its controller have died."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from dist_aclgraph.actors.cluster import placement
from dist_aclgraph.actors.cluster.local_ray import NAMESPACE
from dist_aclgraph.errors import PlacementError
from tests.deployments import forked_actor
from tests.slow import slow

ALL = placement.BundleRequest({"NPU": 1.0}, 1, 8, "STRICT_PACK")
DEAD, LIVING = "controller-0000dead", "controller-0000beef"


class Idle:
    pass


@pytest.fixture
def made(ray_cluster: None) -> Iterator[list[PlacementGroup]]:
    """Yield an empty list. The test adds its placement groups to the list; they are removed after
    the test.

    During the test, the controller of another deployment runs.
    """
    controller = forked_actor(Idle).options(name=LIVING, namespace=NAMESPACE).remote()
    found: list[PlacementGroup] = []
    yield found
    for group in found:
        remove_placement_group(group)
    ray.kill(controller)


def state_of(group: PlacementGroup) -> str:
    return str(placement_group_table(group)["state"])


def test_places_of_a_dead_controller_go_to_a_waiting_deployment(made: list[PlacementGroup]) -> None:
    made.append(placement.reserve(ALL, 60.0, f"{DEAD}/0"))

    made.append(placement.reserve(ALL, 60.0, f"{LIVING}/0"))

    assert [state_of(group) for group in made] == ["REMOVED", "CREATED"]


@pytest.mark.parametrize("name", [f"{LIVING}/0", slow("mine/0"), slow("controller-of-mine/0")])
def test_places_of_the_living_and_of_strangers_stay(name: str, made: list[PlacementGroup]) -> None:
    made.append(placement.reserve(ALL, 60.0, name))

    with pytest.raises(PlacementError, match="are other deployments holding the NPUs"):
        placement.reserve(ALL, 3.0, f"{LIVING}/1")

    assert state_of(made[0]) == "CREATED"
