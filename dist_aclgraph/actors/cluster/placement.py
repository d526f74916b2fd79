"""Reserves NPUs. Each lockstep group has one of Ray's placement groups, which consists of bundles.

Ray never splits a bundle over several nodes. So each tensor parallel group is one bundle on one
node. If ``parallel.tp_across_nodes`` is set, each rank may be a bundle, and the group may span
several nodes. The functions that do not call Ray choose the bundles to request, and the order of
the ranks. The other functions call Ray, and wait for a limited time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import Any, Literal

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from dist_aclgraph.actors.cluster.local_ray import CONTROLLER, NAMESPACE
from dist_aclgraph.errors import PlacementError
from dist_aclgraph.topology import ParallelLayout

# An emulated NPU is no resource of Ray. So a rank with an emulated NPU requests a small fraction of
# a CPU. Ray then considers the rank when Ray chooses nodes.
EMULATED_RANK = {"CPU": 0.001}
START = "start nodes with --resources='{\"NPU\": 8}'"
ROOM_S, POLL_S = 5.0, 0.1
SWEEP_S = 2.0  # seconds between two calls of ``release_dead`` while ``reserve`` waits
OF_A_CONTROLLER = re.compile(rf"({CONTROLLER}-[0-9a-f]{{8}})/")


@dataclass(frozen=True)
class Node:
    """A living node of the Ray cluster.

    Attributes:
        npus: number of NPUs that the node declares. ``free_nodes`` stores the number of unused NPUs
            here.
    """

    node_id: str
    address: str
    npus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.address}/{self.node_id[:8]}"


@dataclass(frozen=True)
class BundleRequest:
    """The resources that one lockstep group requests from Ray.

    Attributes:
        rank: the amount of each resource that a rank needs; the keys are Ray's names of the
            resources.
        num_bundles, ranks_of_bundle: number of bundles, and number of ranks in each bundle.
        labels: the labels that a node must have to be used.
    """

    rank: dict[str, float]
    num_bundles: int
    ranks_of_bundle: int
    strategy: Literal["STRICT_PACK", "PACK"]
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of ranks of a group."""
        return self.num_bundles * self.ranks_of_bundle

    @property
    def ranks_of_node(self) -> int:
        """Number of ranks that must be on the same node."""
        return self.size if self.strategy == "STRICT_PACK" else self.ranks_of_bundle

    @property
    def bundles(self) -> list[dict[str, float]]:
        count = self.ranks_of_bundle
        bundle = {name: count * amount for name, amount in self.rank.items()}
        return [dict(bundle) for _ in range(self.num_bundles)]


def plan_bundles(
    layout: ParallelLayout,
    num_groups: int,
    nodes: Sequence[Node],
    labels: Mapping[str, str] | None = None,
    *,
    tp_across_nodes: bool = False,
    may_be_undeclared: bool = False,
) -> BundleRequest:
    """Choose the bundles of one group, and Ray's strategy. If possible, all ranks of a group are on
    a single node.

    Args:
        layout: layout of the whole deployment.
        num_groups: number of groups to place now; NPUs are required only for these groups.
        nodes: the living nodes of the cluster.
        labels: labels that a node must have.
        tp_across_nodes: whether a tensor parallel group may span several nodes if no node is large
            enough for the group.
        may_be_undeclared: whether a group may be placed on any node if no node declares NPUs. This
            is allowed for emulated NPUs.

    Raises:
        PlacementError: the cluster has too few NPUs, or its nodes have too few NPUs each.
    """
    labels = dict(labels or {})
    size = layout.world_size // len(layout.lockstep_groups)
    fitting = _with_labels(nodes, labels)
    if not fitting:
        raise PlacementError(
            f"no living node has the labels {_words(labels)} of cluster.labels; the Ray cluster "
            f"has {', '.join(sorted(map(str, nodes))) or 'no node'}; start nodes with "
            f"--labels={_words(labels)}, or change cluster.labels"
        )
    if may_be_undeclared and not any(node.npus for node in nodes):
        return BundleRequest(EMULATED_RANK, 1, size, "STRICT_PACK", labels)
    total, needed = sum(node.npus for node in fitting), num_groups * size
    has = f"the Ray cluster has {total} ({_by_node(fitting)})"
    if total < needed:
        which = f" on nodes with the labels {_words(labels)}" if labels else ""
        raise PlacementError(
            f"the deployment needs {needed} NPUs{which} for {num_groups} times {size}, {has}; "
            f"lower parallel.tp, parallel.dp, parallel.pcp or parallel.ep, or add nodes with NPUs; "
            f"for emulated NPUs, {START}"
        )
    unit = layout.tp
    ways = [
        BundleRequest({"NPU": 1}, size // unit, unit, "STRICT_PACK", labels),
        BundleRequest({"NPU": 1}, size // unit, unit, "PACK", labels),
    ]
    if tp_across_nodes:
        ways.append(BundleRequest({"NPU": 1}, size, 1, "PACK", labels))
    # The first attempt counts all groups of the deployment, even if only one lost group is
    # replaced. So the new group gets the bundles of the lost group, and fits on the same nodes.
    for count in (max(num_groups, len(layout.lockstep_groups)), num_groups):
        for request in ways:
            if has_places(request, fitting, count):
                return request
    raise PlacementError(
        f"the deployment needs {needed // unit} times {unit} NPUs (parallel.tp) that share "
        f"a node, {has}, which is room for {sum(node.npus // unit for node in fitting)}; lower "
        "parallel.tp, or set parallel.tp_across_nodes=true if the links between nodes are those "
        "between the NPUs of one node"
    )


def has_places(request: BundleRequest, nodes: Sequence[Node], num_groups: int) -> bool:
    """Return whether the groups fit on these nodes. Ray may fill the nodes in any order. So the
    result is True only if the groups fit for each possible order.
    """
    if "NPU" not in request.rank:
        return True  # no node declares emulated NPUs, so any node can be used
    unit = request.ranks_of_node
    found = sum(node.npus // unit for node in _with_labels(nodes, request.labels))
    return found * unit >= num_groups * request.size


def rank_order(landed: Sequence[tuple[str, tuple[int, ...]]]) -> list[int]:
    """Return the workers' indexes in the order of their ranks. Neighbouring ranks get neighbouring
    NPUs of a node.

    Each tensor parallel group is on one node, unless a group may span nodes (``plan_bundles``).

    Args:
        landed: for each worker, the node and the NPUs that Ray has assigned to it.
    """
    return sorted(range(len(landed)), key=lambda i: (*landed[i], i))


def _by_node(nodes: Sequence[Node]) -> str:
    return ", ".join(sorted(f"{node}: {node.npus}" for node in nodes))


def _with_labels(nodes: Sequence[Node], labels: Mapping[str, str]) -> list[Node]:
    return [node for node in nodes if labels.items() <= dict(node.labels).items()]


def _words(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))


def cluster_nodes() -> list[Node]:
    """Return the living nodes of the cluster."""
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["Resources"].get("NPU", 0)),
            node.get("Labels") or {},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def free_nodes() -> list[Node]:
    """Return the living nodes. Each node's ``npus`` is Ray's current count of unused NPUs."""
    available = available_resources_per_node()
    return [
        replace(node, npus=int(available.get(node.node_id, {}).get("NPU", 0)))
        for node in cluster_nodes()
    ]


def may_have_others(address: str) -> bool:
    """Return whether a cluster with a node at ``address`` can have other nodes, now or later.

    A cluster on loopback has other nodes only if Ray simulates nodes on this machine.
    """
    return not ip_address(address).is_loopback or len(cluster_nodes()) > 1


def has_room(request: BundleRequest, num_groups: int, wait_s: float = ROOM_S) -> bool:
    """Return whether this number of groups could be placed now. The answer uses Ray's count of free
    NPUs.

    Args:
        wait_s: how long to wait for free NPUs, in seconds. Freed NPUs enter Ray's count only after
            some time.
    """
    deadline_s = time.monotonic() + wait_s
    while not (fits := has_places(request, free_nodes(), num_groups)):
        if time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    return fits


def count_npus(request: BundleRequest, nodes: Sequence[Node]) -> str:
    """Return a text that says how many NPUs each node has, and how many NPUs a group needs."""
    nodes, unit = _with_labels(nodes, request.labels), request.ranks_of_node
    return (
        f"{sum(node.npus for node in nodes)} ({_by_node(nodes) or 'on no node'}), of which a group "
        f"takes {request.size // unit} times {unit} on one node"
    )


def reserve(request: BundleRequest, timeout_s: float, name: str) -> PlacementGroup:
    """Return a placement group that is ready.

    Args:
        name: name of the placement group; ``release_all`` searches for it.

    Raises:
        PlacementError: the group was not ready in time; the message says what is available.
    """
    group, bundles = ask_for(request, name), request.bundles
    deadline_s = time.monotonic() + timeout_s
    while not group.wait(timeout_seconds=min(SWEEP_S, timeout_s)):
        release_dead()
        if time.monotonic() < deadline_s:
            continue
        available = {k: v for k, v in ray.available_resources().items() if k in ("NPU", "CPU")}
        remove_placement_group(group)
        raise PlacementError(
            f"{len(bundles)} bundles of {bundles[0]} ({request.strategy}) were not placed within "
            f"{timeout_s:g} s; available now: {available or 'nothing'}; are other deployments "
            "holding the NPUs?"
        )
    return group


def ask_for(request: BundleRequest, name: str) -> PlacementGroup:
    """Request a placement group, and do not wait. Ray places its bundles when enough resources are
    free.

    Args:
        name: name of the placement group; ``release_all`` searches for it.
    """
    bundles = request.bundles
    return placement_group(
        bundles,
        strategy=request.strategy,
        name=name,
        bundle_label_selector=[request.labels for _ in bundles] if request.labels else None,
    )


def is_placed(group: PlacementGroup) -> bool:
    """Return whether all bundles of a placement group are placed on nodes that are alive now."""
    return bool(placement_group_table(group)["state"] == "CREATED")


def leading_node(group: PlacementGroup) -> str:
    """Return the node of rank 0 of a placed group; ``rank_order`` defines the order of ranks."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return min(nodes.values())


def release(group: PlacementGroup) -> None:
    """Free the bundles. Ray kills the actors in the bundles."""
    remove_placement_group(group)


def release_all(prefix: str) -> None:
    """Free the bundles of a deployment whose controller died and could not free the bundles.

    Without this call, Ray keeps the bundles until the controller's job ends.
    """
    for entry in placement_group_table().values():
        if entry["name"].startswith(prefix) and entry["state"] != "REMOVED":
            remove_placement_group(get_placement_group(entry["name"]))


def release_dead() -> None:
    """Free the bundles of deployments whose controller and driver have both ended.

    A killed replica of Ray Serve cannot call ``release_all``. Ray does not free the replica's
    bundles, because the job of Ray Serve never ends.
    """
    for entry in placement_group_table().values():
        found = OF_A_CONTROLLER.match(entry["name"])
        if found and entry["state"] != "REMOVED" and not _is_actor(found[1]):
            with suppress(ValueError):  # another process has freed the bundles
                remove_placement_group(get_placement_group(entry["name"]))


def _is_actor(name: str) -> bool:
    try:
        ray.get_actor(name, NAMESPACE)
    except ValueError:
        return False
    return True


def actor_options(group: PlacementGroup, request: BundleRequest, bundle: int) -> dict[str, Any]:
    """Return the Ray options that start a worker with the resources of one rank."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "num_cpus": request.rank.get("CPU", 0),
        "resources": {name: n for name, n in request.rank.items() if name != "CPU"},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        ),
    }
