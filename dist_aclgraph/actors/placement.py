"""Finding NPUs: one placement group per lockstep group, one bundle per worker.

Tensor parallel ranks share a node wherever one has enough NPUs (STRICT_PACK). The pure part says
what to ask Ray for; the rest asks, with a bounded wait.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from dist_aclgraph.errors import PlacementError

# An emulated NPU needs no resource of its own; the little CPU lets Ray spread and account.
ROOM_S, POLL_S = 5.0, 0.1
EMULATED_BUNDLE = {"CPU": 0.001}


@dataclass(frozen=True)
class BundleRequest:
    """What one lockstep group asks Ray for."""

    bundles: list[dict[str, float]]
    strategy: Literal["STRICT_PACK", "PACK"]


def plan_bundles(
    group_size: int, npus_by_node: dict[str, float], *, is_emulated: bool
) -> BundleRequest:
    """Choose bundles and strategy for one group.

    Args:
        npus_by_node: NPUs that each living node has, used or not.
        is_emulated: without declared NPUs, any node will do.

    Raises:
        PlacementError: the cluster has too few NPUs in all.
    """
    total = sum(npus_by_node.values())
    if total == 0 and is_emulated:
        return BundleRequest([dict(EMULATED_BUNDLE) for _ in range(group_size)], "STRICT_PACK")
    if total < group_size:
        raise PlacementError(
            f"the deployment needs {group_size} NPUs for one group, the Ray cluster has {total:g} "
            f"({_by_node(npus_by_node)}); start nodes with --resources='{{\"NPU\": 8}}', or lower "
            "parallel.tp, parallel.pcp or parallel.ep"
        )
    fits_one_node = max(npus_by_node.values()) >= group_size
    return BundleRequest(
        [{"NPU": 1} for _ in range(group_size)], "STRICT_PACK" if fits_one_node else "PACK"
    )


def _by_node(npus_by_node: dict[str, float]) -> str:
    return ", ".join(f"{node}: {count:g}" for node, count in sorted(npus_by_node.items()))


def cluster_npus() -> dict[str, float]:
    """Return the NPUs of each living node, by address."""
    return {
        f"{node['NodeManagerAddress']}/{node['NodeID'][:8]}": node["Resources"].get("NPU", 0.0)
        for node in ray.nodes()
        if node["Alive"]
    }


def has_room(num_workers: int, *, is_emulated: bool) -> bool:
    """Whether so many NPUs are free, as far as counts say.

    Ray counts what was given back with a delay: it is waited for, some seconds at most.
    """
    if is_emulated and not sum(cluster_npus().values()):
        return True
    deadline_s = time.monotonic() + ROOM_S
    while (is_full := num_free() < num_workers) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return not is_full


def num_free() -> float:
    """Return how many NPUs nobody holds."""
    return float(ray.available_resources().get("NPU", 0.0))


def reserve(request: BundleRequest, timeout_s: float, name: str) -> PlacementGroup:
    """Return a placement group that is ready.

    Args:
        name: by which ``release_all`` finds it.

    Raises:
        PlacementError: it was not ready in time; says what is available.
    """
    group = placement_group(request.bundles, strategy=request.strategy, name=name)
    if not group.wait(timeout_seconds=timeout_s):
        available = {k: v for k, v in ray.available_resources().items() if k in ("NPU", "CPU")}
        remove_placement_group(group)
        raise PlacementError(
            f"{len(request.bundles)} bundles of {request.bundles[0]} ({request.strategy}) were not "
            f"placed within {timeout_s:g} s; available now: {available or 'nothing'}; are other "
            "deployments holding the NPUs?"
        )
    return group


def release(group: PlacementGroup) -> None:
    """Give the bundles back; actors in them die."""
    remove_placement_group(group)


def release_all(prefix: str) -> None:
    """Give back the bundles of a deployment whose controller is gone, and could not do it itself.

    Ray keeps them for as long as the job lives that the controller was part of.
    """
    for entry in placement_group_table().values():
        if entry["name"].startswith(prefix) and entry["state"] != "REMOVED":
            remove_placement_group(get_placement_group(entry["name"]))


def actor_options(group: PlacementGroup, index: int, bundle: dict[str, float]) -> dict[str, Any]:
    """Return Ray options that put an actor into one bundle with all that the bundle holds."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "num_cpus": bundle.get("CPU", 0),
        "resources": {"NPU": 1} if "NPU" in bundle else {},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index
        ),
    }
